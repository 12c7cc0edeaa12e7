"""Modules that are traced, compiled, wrapped, reparametrised or hooked, and gradients that are not the derivative."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from problems.modules.base import (
    D,
    Formula,
    Own,
    Pre,
    Question,
    Stack,
    Step,
    asks,
    attend,
    fused,
    merge,
    one,
    plain,
    pre,
    seeded,  # fmt: skip
)
from problems.modules.positions import DISTANCE
from problems.modules.softmax import Bare, alone, formula_bare, matmul, qkv, stack_of
from problems.modules.torch_modules import encoder, encoder_layer, encoder_step

Build = Callable[[], nn.Module]


def stack() -> nn.Module:
    return seeded(Stack(Pre(Own(matmul)), Pre(Own(matmul))))


def eager(build: Build, formula: Callable[..., Formula]) -> Callable[..., Formula]:
    """The formula of the module before it was wrapped: its weights are drawn alike."""
    return lambda m, *inputs: formula(build(), *inputs)


class Scripted(nn.Module):
    """Attention that can be scripted."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x).view(1, -1, 2, 4), self.k(x).view(1, -1, 2, 4), self.v(x).view(1, -1, 2, 4)
        weights = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) * 0.5, dim=-1)
        return self.o(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))


def scripted_stack() -> nn.Module:
    return seeded(Stack(Pre(Scripted()), Pre(Scripted())))


def with_scripted_networks() -> nn.Module:
    m: Any = stack()
    for b in m.blocks:
        b.mlp = torch.jit.script(b.mlp)
    return m


def with_traced_networks() -> nn.Module:
    m: Any = stack()
    for b in m.blocks:
        b.mlp = torch.jit.trace(b.mlp, one())
    return m


def with_scripted_attention() -> nn.Module:
    m: Any = scripted_stack()
    for b in m.blocks:
        b.att = torch.jit.script(b.att)
    return m


def traced() -> nn.Module:
    return torch.jit.trace(stack(), one())  # pyright: ignore


def graph(build: Build) -> Build:
    return lambda: torch.fx.symbolic_trace(build())


def parametrised(kind: Any, *names: str) -> Build:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            m = Own(fused)
            for name in names:
                kind(getattr(m, name))
        return seeded(m)

    return build


def tied() -> nn.Module:
    m = Own(fused)
    m.k.weight = m.q.weight
    return seeded(m)


def hooked(place: Callable[[Any], nn.Module], before: bool, hook: Any) -> Build:
    def build() -> nn.Module:
        m = seeded(Stack(Pre(Own(fused)), Pre(Own(fused)), norm=False))
        at = place(m)
        if before:
            at.register_forward_pre_hook(hook)
        else:
            at.register_forward_hook(hook)
        return m

    return build


def doubled(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (2 * args[0],)


def halved(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out / 2


def steered(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out + torch.linspace(-1, 1, D, dtype=out.dtype)


def bare_pre(b: Any, into: float = 1.0, normed: float = 1.0, inner: float = 1.0, outer: float = 1.0) -> Step:
    """`Pre` from its weights, so that no hook runs, and what hooks scale: its input, its first norm, attention's two ends."""

    def norm(t: Tensor) -> Tensor:
        return normed * F.layer_norm(t, (D,), b.ln1.weight, b.ln1.bias)

    def raw(t: Tensor) -> Tensor:
        return b.att.o(plain(b.att, t))

    def inside(t: Tensor) -> Tensor:
        t = t + outer * raw(inner * norm(t))
        return t + b.mlp(b.ln2(t))

    maps: Any = {"block unhooked": lambda t: (inside, into * t), "attention unhooked": lambda t: (raw, inner * norm(into * t))}
    return Step(lambda t: inside(into * t), lambda t: outer * raw(inner * t), lambda t: plain(b.att, inner * t), norm, maps)


def hooks(**scales: float) -> Callable[..., Formula]:
    return lambda m, x: Formula(x, [bare_pre(m.blocks[0], **scales), bare_pre(m.blocks[1])])


def doubled_input(m: Any, x: Tensor) -> Formula:
    """Attention and heads start inside, behind the hook on the block."""
    inner = bare_pre(m.blocks[0])
    maps: Any = {"attention": lambda t: (inner.attention, inner.norm(2 * t)), "block unhooked": lambda t: (inner.block, 2 * t)}
    return Formula(x, [Step(lambda t: inner.block(2 * t), maps=maps), bare_pre(m.blocks[1])])


class Within(nn.Module):
    """A linear layer, then blocks, each run by `way`."""

    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.blocks, self.way = nn.Linear(D, D), nn.ModuleList([Pre(Own(fused)) for _ in range(2)]), way

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.way(block, x)
        return x


def checkpointed(block: nn.Module, x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False)


def reentrant(block: nn.Module, x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=True)


def autocast(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return block(x)


def by_math(block: nn.Module, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return block(x)


def without_gradient(block: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return block(x)


def in_inference(block: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return block(x)


def functional(block: nn.Module, x: Tensor) -> Any:
    return torch.func.functional_call(block, dict(block.named_parameters()), (x,))


def within(m: Any, x: Tensor) -> Formula:
    return Formula(m.embed(x), [pre(b) for b in m.blocks])


class Anything(nn.Module):
    """Forwards that name no argument."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([AnyBlock(), AnyBlock()])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = args[0]
        for block in self.blocks:
            x = block(hidden_states=x, **kwargs)
        return x


class AnyBlock(Pre):
    def __init__(self) -> None:
        super().__init__(Own(fused))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(kwargs["hidden_states"])


def stack_of_any(m: Any, x: Tensor) -> Formula:
    return Formula(x, [pre(b) for b in m.blocks])


def vmapped(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    run = torch.vmap(lambda q, k, v: torch.softmax(q @ k.mT / 2, -1) @ v, in_dims=1, out_dims=1)
    return merge(run(q, k, v))


class Flex(nn.Module):
    """torch's flex_attention, on the CPU, where it knows no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.q, self.k, self.v, self.o = nn.LayerNorm(D), *(nn.Linear(D, D) for _ in range(4))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln(x)
        with warnings.catch_warnings(action="ignore"):  # it says that it is slow
            out: Any = flex_attention(*qkv(self, h), score_mod=lambda score, b, h, i, j: score - 0.25 * (i - j).abs())
        return x + self.o(merge(out))


def flex(m: Any, x: Tensor) -> Formula:
    def heads(t: Tensor) -> Tensor:
        return merge(attend(*qkv(m, t), bias=-0.25 * DISTANCE.abs()))

    return Formula(x, [Step(lambda t: t + m.o(heads(m.ln(t))), lambda t: m.o(heads(t)), heads, m.ln)])


def ways(name: str, way: Callable[[nn.Module, Tensor], Tensor], *specs: str, **others: Any) -> list[Question]:
    return asks(name, lambda: seeded(Within(way)), one, within, *specs, **others)


def frozen(build: Build) -> Build:
    return lambda: build().requires_grad_(False)


FLEX = "attention, heads, block"  # runs under no dispatch mode
SOME = "attention, block 1, model"

QUESTIONS: list[Question] = [
    *asks(
        "torch.fx, attention",
        graph(lambda: seeded(Own(matmul))),
        one,
        eager(lambda: seeded(Own(matmul)), alone(plain)),
        "attention, heads",
    ),
    *asks(
        "torch.fx, no submodules",
        graph(lambda: seeded(Bare())),
        one,
        eager(lambda: seeded(Bare()), formula_bare),
        "attention, block",
    ),
    *asks("torch.fx, blocks", graph(stack), one, eager(stack, stack_of(plain)), "attention 1, block, block 1, model"),
    *asks("scripted networks", with_scripted_networks, one, eager(stack, stack_of(plain)), SOME),
    *asks("traced networks", with_traced_networks, one, eager(stack, stack_of(plain)), SOME),
    *asks(
        "scripted attention",
        with_scripted_attention,
        one,
        eager(scripted_stack, stack_of(plain)),
        "attention 1, heads, block, model",
    ),
    *asks("a traced model", traced, one, eager(stack, stack_of(plain)), "attention or refused, block 1 or refused"),
    *asks(
        "nn.DataParallel", lambda: nn.DataParallel(stack()), one, eager(stack, stack_of(plain)), "attention 1, block 1, model"
    ),
    *asks("torch.compile", lambda: torch.compile(stack(), backend="eager"), one, eager(stack, stack_of(plain)), SOME),  # pyright: ignore
    *asks(
        "spectral norms", parametrised(nn.utils.parametrizations.spectral_norm, "o", "v"), one, alone(plain), "attention, heads"
    ),
    *asks(
        "weight norms",
        parametrised(nn.utils.parametrizations.weight_norm, "q", "k", "v", "o"),
        one,
        alone(plain),
        "attention, heads",
    ),
    *asks("one weight for queries and keys", tied, one, alone(plain), "attention, heads"),
    *asks(
        "a hook before a block doubles its input",
        hooked(lambda m: m.blocks[0], True, doubled),
        one,
        doubled_input,
        "attention, block or unhooked, block 1",
    ),
    *asks(
        "a hook before attention doubles its input",
        hooked(lambda m: m.blocks[0].att, True, doubled),
        one,
        hooks(inner=2.0),
        "attention or unhooked, block, model",
    ),
    *asks(
        "a hook behind attention halves it",
        hooked(lambda m: m.blocks[0].att, False, halved),
        one,
        hooks(outer=0.5),
        "heads, block, model",
    ),
    *asks(
        "a hook behind a norm halves it",
        hooked(lambda m: m.blocks[0].ln1, False, halved),
        one,
        hooks(normed=0.5),
        "attention, normed, block",
    ),
    *asks("a hook adds a vector to a block", hooked(lambda m: m.blocks[0], False, steered), one, hooks(), "block"),
    *ways("checkpoints", checkpointed, "attention 1, block 1, model"),
    *ways("reentrant checkpoints", reentrant, "attention 1, block 1, model"),
    *ways("autocast, in double", autocast, "attention 1, heads, block 1, model"),
    *ways("a backend by force", by_math, "attention, block 1"),
    *ways("blocks under no_grad", without_gradient, "attention 1, block 1, update, model"),
    *ways("blocks in inference mode", in_inference, "attention, block, model"),
    *ways("functional_call", functional, "attention 1, block 1, model"),
    *asks("forwards that name no argument", lambda: seeded(Anything()), one, stack_of_any, "attention 1, block 1"),
    *asks("vmap over heads", lambda: seeded(Own(vmapped)), one, alone(plain), "attention, heads"),
    *asks("flex_attention", lambda: seeded(Flex()), one, flex, FLEX, hidden=FLEX),
    *asks(
        "nn.TransformerEncoderLayer, frozen",
        frozen(lambda: seeded(encoder_layer())),
        one,
        lambda m, x: Formula(x, [encoder_step(m)]),
        "attention, heads, block",
        hidden="attention, heads",
    ),
    *asks(
        "nn.TransformerEncoder, frozen",
        frozen(lambda: seeded(nn.TransformerEncoder(encoder_layer(norm_first=True), 2, enable_nested_tensor=False))),
        one,
        encoder,
        "attention 1, block 1, model",
        hidden="attention 1",
    ),
]
