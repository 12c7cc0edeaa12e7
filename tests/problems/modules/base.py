"""What a question about a module is, how its truth is computed, and the plain functions that truths are written with."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

D, H, N = 8, 2, 5  # width, heads, tokens

Function = Callable[[Tensor], Tensor]
Point = tuple[Function, Tensor]
Truth = Callable[[nn.Module, Any], Point]
Inputs = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True, eq=False)
class Question:
    """What is asked of a module, and the true answer: a function of one tensor and the point to differentiate it at.

    A truth of None says that the question must be refused; None in `either` that it may be.
    Several streams are one flat tensor, the entries of each side by side; `parts` says how many entries each has.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    ask: dict[str, Any]
    truth: Truth | None
    either: tuple[Truth | None, ...] = ()
    parts: tuple[int, ...] = ()
    tolerance: float = 1e-9  # how far the module's own arithmetic may be from the formula's, relative
    observed: bool = True  # False: no run of the module shows this map, from end to end and moving nothing else


@functools.cache
def constants(question: Question) -> tuple[float | None, ...]:
    """Every answer that is right, the first one first: the largest singular value of the dense Jacobian, None for a refusal."""
    answers = []
    for truth in (question.truth, *question.either):
        answers.append(None if truth is None else largest(*truth(question.build(), question.inputs())))
    return tuple(answers)


def constant(question: Question) -> float | None:
    """The answer: the largest singular value of the dense Jacobian, None where the question must be refused."""
    return constants(question)[0]


def largest(function: Function, point: Tensor) -> float:
    return float(torch.linalg.matrix_norm(jacobian(function, point), 2))


def jacobian(function: Function, point: Tensor) -> Tensor:
    """The dense Jacobian, (outputs, inputs), one reverse pass for each output."""
    point = point.detach().double()

    def flat(t: Tensor) -> Tensor:
        return function(t.reshape(point.shape)).reshape(-1)

    return torch.autograd.functional.jacobian(flat, point.reshape(-1), vectorize=True).detach()  # pyright: ignore


def same(t: Tensor) -> Tensor:
    return t


@dataclass(frozen=True)
class Step:
    """One layer as functions of the tokens.

    `norm` leads from the stream to what enters attention, `attention` and `heads` start there, `block` is the whole.
    `maps` holds all others: a name, and what gives the function and its point from the stream that enters the layer.
    """

    block: Function = same
    attention: Function | None = None
    heads: Function | None = None
    norm: Function = same
    maps: dict[str, Callable[[Tensor], Point]] = field(default_factory=dict)


@dataclass(frozen=True)
class Formula:
    """A model as plain functions: what enters the first layer, the layers, what follows the last one, and the head."""

    enter: Tensor
    steps: Sequence[Step]
    final: Function = same
    logits: Function | None = None

    def chain(self, first: int, last: int) -> Function:
        def chained(t: Tensor) -> Tensor:
            for step in self.steps[first : last + 1]:
                t = step.block(t)
            return t

        return chained

    def answer(self, layer: int, name: str) -> Point:
        """The function and the point of a map of that name, or of a span "to …"."""
        x, step = self.chain(0, layer - 1)(self.enter), self.steps[layer]
        last = self.chain(layer, len(self.steps) - 1)
        if name in step.maps:
            return step.maps[name](x)
        if name.startswith("to "):
            end = name.removeprefix("to ")
            if end == "logits":
                assert self.logits is not None
                logits = self.logits
                return lambda t: logits(self.final(last(t))), x
            return (last, x) if end == "final" else (self.chain(layer, int(end)), x)
        if name == "model":
            whole = self.chain(0, len(self.steps) - 1)
            return lambda t: self.final(whole(t)), self.enter
        if name in ("block", "update"):
            return (step.block, x) if name == "block" else (lambda t: step.block(t) - t, x)
        inner = step.heads if name == "heads" else step.attention
        assert inner is not None, name
        return (lambda t: inner(step.norm(t)), x) if name == "normed" else (inner, step.norm(x))


def asks(
    name: str,
    build: Callable[[], nn.Module],
    inputs: Callable[[], Inputs],
    formula: Callable[..., Formula],
    *specs: str,
    hidden: str = "",
    **others: Any,
) -> list[Question]:
    """Questions about one module, by specs with commas between them.

    A spec is a map and a layer ("block 1"), with "stream=0" or "call=1" behind it, or a span ("0>1", "0>final").
    "refused" behind it says that it must be refused, "or refused" that it may be,
    and "or other" that the formula's map of the name "… other" is as good an answer. `hidden` names those not `observed`.
    """
    apart = hidden.split(", ")
    return [
        _question(name, build, inputs, formula, spec, observed=spec not in apart, **others)
        for spec in ", ".join(specs).split(", ")
    ]


def _question(name: str, build: Any, inputs: Any, formula: Callable[..., Formula], spec: str, **others: Any) -> Question:
    said, _, alternative = spec.partition(" or ")
    words = said.split()
    refused = "refused" in words
    head, options = words[0], [word for word in words[1:] if "=" in word]
    if ">" in head:
        first, _, end = head.partition(">")
        layer, key = int(first), f"to {end}"
        ask: dict[str, Any] = {"layer": layer, "to": int(end) if end.isdigit() else end}
    else:
        layer = next((int(word) for word in words[1:] if word.isdigit()), 0)
        key = " ".join([head, *(option for option in options if not option.startswith("side"))])
        ask = {"layer": layer, "map": head}
        for option in options:
            left, _, right = option.partition("=")
            ask[left] = int(right) if right.isdigit() else right

    def truth(key: str) -> Truth:
        def answer(module: nn.Module, given: Inputs) -> Point:
            model = formula(module, **given) if isinstance(given, dict) else formula(module, *given)
            return model.answer(layer, key)

        return answer

    either: tuple[Truth | None, ...] = ()
    if alternative:
        either = (None,) if alternative == "refused" else (truth(f"{key} {alternative}"),)
    return Question(f"{name} · {spec}", build, inputs, ask, None if refused else truth(key), either, **others)


def tokens(n: int = N, d: int = D, seed: int = 7) -> Tensor:
    """Tokens (1, n, d), the same at every call."""
    return torch.randn(1, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def one() -> tuple[Tensor]:
    """Inputs of a module that takes tokens alone."""
    return (tokens(),)


def seeded(module: nn.Module, seed: int = 0, gain: float = 1.2) -> nn.Module:
    """The module in double and in eval mode, with weights that leave attention neither uniform nor saturated."""
    g = torch.Generator().manual_seed(seed)
    module.double().eval()
    with torch.no_grad():
        for path, p in module.named_parameters():
            name = path.rpartition(".")[2]
            drawn = torch.randn(p.shape, dtype=torch.float64, generator=g)
            if p.ndim < 2:
                p.copy_(1 + 0.3 * drawn if "weight" in name or "gain" in name else 0.4 * drawn)
            else:
                p.copy_(gain * drawn / p[0].numel() ** 0.5 if "weight" in name or name.startswith("w") else 0.8 * drawn)
        for path, b in module.named_buffers():
            if "running" in path:  # a batch norm's
                b.copy_(1 + 0.5 * torch.rand(b.shape, dtype=torch.float64, generator=g))
    return module


def split(t: Tensor, heads: int = H) -> Tensor:
    """(…, n, d) to (…, heads, n, d / heads)."""
    return t.unflatten(-1, (heads, -1)).transpose(-3, -2)


def merge(t: Tensor) -> Tensor:
    """(…, heads, n, d) to (…, n, heads · d)."""
    return t.transpose(-3, -2).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0, *, scale: float | None = None) -> Tensor:
    """Softmax attention, written out: the reference that every truth is made of."""
    logits = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    weights = (logits - logits.amax(-1, keepdim=True).detach()).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def causal(n: int = N) -> Tensor:
    """0 on and below the diagonal, minus infinity above it."""
    return torch.zeros(n, n, dtype=torch.float64).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)


def mlp(d: int = D) -> nn.Sequential:
    return nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))


class Own(nn.Module):
    """Attention of one's own with four projections; `way` computes the heads' outputs, side by side."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor], kv: int = D, **extras: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(D, D), nn.Linear(D, kv), nn.Linear(D, kv), nn.Linear(D, D)
        self.way = way
        for name, extra in extras.items():
            if isinstance(extra, Tensor) and not isinstance(extra, nn.Parameter):
                self.register_buffer(name, extra)
            else:
                setattr(self, name, extra)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.way(self, x))


def fused(m: Any, x: Tensor) -> Tensor:
    """The heads' outputs by torch's own function."""
    return merge(nn.functional.scaled_dot_product_attention(split(m.q(x)), split(m.k(x)), split(m.v(x))))


def plain(m: Any, x: Tensor) -> Tensor:
    """The heads' outputs, written out."""
    return merge(attend(split(m.q(x)), split(m.k(x)), split(m.v(x))))


class Pre(nn.Module):
    """A pre-norm block: attention and a small network, each with its norm and its residual."""

    def __init__(self, att: nn.Module) -> None:
        super().__init__()
        self.ln1, self.att, self.ln2, self.mlp = nn.LayerNorm(D), att, nn.LayerNorm(D), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.ln1(x))
        return x + self.mlp(self.ln2(x))


def pre(b: Any, heads: Callable[[Any, Tensor], Tensor] = plain) -> Step:
    """What `Pre` computes, with the heads' outputs by that function of its attention."""

    def attention(t: Tensor) -> Tensor:
        return b.att.o(heads(b.att, t))

    def block(t: Tensor) -> Tensor:
        t = t + attention(b.ln1(t))
        return t + b.mlp(b.ln2(t))

    return Step(block, attention, lambda t: heads(b.att, t), b.ln1)


class Stack(nn.Module):
    """Blocks in a list, one after the other, and a norm behind them."""

    def __init__(self, *blocks: nn.Module, norm: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(D) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)
