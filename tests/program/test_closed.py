"""Closed forms read off the graph: queries, keys, values and output are the layer's own; what is no such form is refused."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.fx import Node

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.program import Ends, Layers, Program, ends_of, record
from howsmooth.program.attention import attention
from howsmooth.program.calls import SDPA, find_calls
from howsmooth.program.closed import as_attention
from howsmooth.program.operations import name
from howsmooth.program.replay import Run
from howsmooth.program.sides import agree, off
from howsmooth.program.tracing import Flow
from problems.zoo import GROUPED, SMALL, TOKENS, ZOO, ids, randomize

t: Any = transformers
BIG = {**SMALL, "hidden_size": 24, "max_position_embeddings": 64, **TOKENS}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
MORE = {
    "llama, yarn": lambda: t.LlamaModel(t.LlamaConfig(**BIG, num_key_value_heads=1, rope_parameters=YARN)),
    "cohere": lambda: t.CohereModel(t.CohereConfig(**BIG, num_key_value_heads=1)),
    "phi3": lambda: t.Phi3Model(t.Phi3Config(**BIG, num_key_value_heads=1)),
    "olmo2, one key head": lambda: t.Olmo2Model(t.Olmo2Config(**BIG, num_key_value_heads=1)),
    "glm": lambda: t.GlmModel(t.GlmConfig(**BIG, head_dim=10, num_key_value_heads=1, partial_rotary_factor=0.4)),
}
LIBRARY = [
    "bert", "gpt2", "gpt-neox", "phi", "falcon", "llama", "mistral", "qwen3", "olmo2", "gemma3 local", "t5 encoder", "vit",
    "modernbert local", *MORE,
]  # fmt: skip


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def library(kind: str) -> tuple[Program, int]:
    """A tiny random model in float64, recorded, and the layer to look at."""
    if kind in MORE:
        model, inputs, layer = randomize(MORE[kind](), scale=0.25), {"input_ids": ids(n=11)}, 1
    else:
        animal = ZOO[kind]
        model, inputs, layer = randomize(animal.build(), scale=animal.scale), animal.inputs(), animal.layer
        model = model if animal.side is None else getattr(model, f"get_{animal.side}")()
    given: dict[str, Any] = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    if "use_cache" in inspect.signature(model.forward).parameters:
        given["use_cache"] = False
    return record(model.double(), (), given), layer


def closed(program: Program, layer: int = 0, ends: Ends | None = None) -> tuple[hs.Attention, Tensor, Ends]:
    """The closed form of a layer, what enters it, and its ends."""
    ends = ends_of(Layers(program), layer) if ends is None else ends
    attn = as_attention(Run.recorded(program), ends)
    return attn, Run.recorded(program).values(set(ends.enter))[ends.enter[0]].reshape(-1, attn.width), ends


def check(program: Program, layer: int = 0, ends: Ends | None = None) -> hs.Attention:
    """The closed form of a layer, compared with the graph: queries, keys and values, output, and the norm of the Jacobian."""
    attn, x, ends = closed(program, layer, ends)
    between = ends.flow.between(ends.enter, ends.leave)
    (node,) = (n for n in between if n.target is attention or name(n) == SDPA)
    own = Run.recorded(program).values({*node.args[:3], ends.leave[0]})  # pyright: ignore[reportArgumentType]
    for ours, theirs in zip(attn.vectors(x[None]), node.args[:3], strict=True):
        wanted = own[theirs].reshape(-1, *own[theirs].shape[-2:])  # pyright: ignore[reportArgumentType]
        assert off(ours[0].repeat_interleave(len(wanted) // ours.shape[1], 0), wanted) <= 1e-9
    leave = own[ends.leave[0]]
    axis = 1 if leave.ndim == 3 and leave.shape[0] == len(x) else 0
    assert agree(attn(x), leave.squeeze(axis) if leave.ndim == 3 else leave)
    f = ends.way.at(Run.recorded(program))
    (point,) = f.start
    dense = torch.autograd.functional.jacobian(lambda z: f(z)[0], point, vectorize=True)
    assert isinstance(dense, Tensor)
    truth = float(torch.linalg.matrix_norm(dense.reshape(leave.numel(), x.numel()), 2))
    assert hs.lipschitz(attn, x, solver=hs.DenseSVD()).value == pytest.approx(truth, rel=1e-8)
    return attn


@pytest.mark.parametrize("kind", LIBRARY)
def test_layers_of_the_library(kind: str):
    attn = check(*library(kind))
    assert (attn.rotary is not None) == (kind not in ("bert", "gpt2", "t5 encoder", "vit"))
    assert (attn.q_norm is not None) == kind.startswith(("qwen3", "olmo2", "gemma3"))
    assert attn.coupled == kind.startswith("olmo2")
    assert (attn.bias is not None) == (kind == "t5 encoder")
    assert (attn.window is not None) == (kind in ("mistral", "gemma3 local", "modernbert local"))


def test_soft_capped_attention():
    animal = ZOO["gemma2 local"]
    model = randomize(animal.build(), scale=animal.scale).double()
    program = record(model, (), {"input_ids": ids(), "use_cache": False})
    with pytest.raises(BadInputError, match="one attention call"):
        closed(program, 0)
    ends = ends_of(Layers(program), 0)
    (call,) = (c for c in find_calls(ends.flow) if ends.flow.up(ends.leave[0]) & ends.flow.bit(c.output))
    (q,), (k,), (v,) = call.queries, call.keys, call.values
    assert isinstance(k.args[0], Node)
    settings = {"scale": 6**-0.5, "softcap": 10.0, "causal": True, "window": 4}
    attn = check(*attending(program, ends, call.output, (q, k.args[0], v), settings))
    assert (attn.softcap, attn.window, attn.causal, attn.scale) == (10.0, 4, True, 6**-0.5)


def attending(
    program: Program, ends: Ends, output: Node, operands: tuple[Node, ...], settings: dict[str, Any]
) -> tuple[Program, int, Ends]:
    """The program with the package's own attention in the place of a node."""
    with program.code.graph.inserting_before(output):
        new = program.code.graph.call_function(attention, operands, settings)
    new.meta.update(output.meta)
    output.replace_all_uses_with(new)
    program.code.recompile()
    again = replace(program)
    return again, 0, Ends(ends.enter, ends.leave, Flow(again, ends.flow.begins))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_kinds_and_sinks(kind: str):
    program, sink = recorded(Plain()), torch.tensor([0.5, -1.0], dtype=torch.float64)
    ends = ends_of(Layers(program), 0)
    (node,) = (n for n in program.nodes if name(n) == SDPA)
    settings: dict[str, Any] = {"scale": 0.3, "kind": kind}
    if kind == "softmax":
        program.code.register_buffer("sink", sink)
        with program.code.graph.inserting_before(node):
            settings["sink"] = program.code.graph.get_attr("sink")
        settings["sink"].meta.update(val=sink, order=node.meta["order"])
    else:
        settings["shift"] = -1.0
    attn = check(*attending(program, ends, node, node.args[:3], settings))  # pyright: ignore[reportArgumentType]
    assert attn.kind == (hs.kinds.Softmax(sink) if kind == "softmax" else hs.kinds.Sigmoid(-1.0))


def test_weights_are_the_models_own():
    program, layer = library("llama")
    attn, _, _ = closed(program, layer)
    for side in "qkvo":
        weight = program.module.get_parameter(f"layers.{layer}.self_attn.{side}_proj.weight")
        assert torch.equal(getattr(attn, f"w_{side}"), weight)
    assert attn.b_q is None
    assert attn.rotary is not None
    angle = torch.arange(8)[:, None] * 10000.0 ** (-torch.arange(0, 6, 2) / 6)
    assert float((attn.rotary.cos - angle.cos()).abs().max()) < 1e-6


def test_norms_are_the_models_own():
    program, layer = library("qwen3")
    attn, _, _ = closed(program, layer)
    own: Any = program.module.get_submodule(f"layers.{layer}.self_attn")
    for norm, module in ((attn.q_norm, own.q_norm), (attn.k_norm, own.k_norm)):
        assert isinstance(norm, hs.RMSNorm)
        assert norm.eps == module.variance_epsilon
        assert off(norm.weight, module.weight.detach()) <= 1e-12


class Plain(nn.Module):
    """Attention with something that is, or is no, part of the formula."""

    def __init__(self, what: str = "plain", heads: int = 2):
        super().__init__()
        self.what, self.heads = what, heads
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.gate, self.norm = nn.Linear(8, 8), nn.LayerNorm(4)
        self.weight = nn.Parameter(torch.randn(heads, 8, 8 // heads))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        bias = None
        match self.what:
            case "clipped":
                k = k.clamp(-0.5, 0.5)
            case "rectified":
                k = k.relu()
            case "temperature":
                q = q * torch.linspace(1, 2, n).to(x)[:, None]
            case "shifted values":
                v = v.roll(1, -2)
            case "shifted keys and values":
                k, v = k.roll(1, -2), v.roll(1, -2)
            case "values with norms":
                v = self.norm(v)
            case "biased by its tokens":
                bias = self.gate(x)[:, None, :, :1].expand(-1, -1, -1, n).mT
            case "places in queries and keys":
                q = q + self.q(torch.linspace(0, 1, n).to(x)[:, None] * x.new_ones(8)).unflatten(-1, (2, 4)).transpose(0, 1)
            case "padded":
                bias = torch.arange(n)[None, None, None] < n - 1
            case "norms":
                q, k = self.norm(q), self.norm(k)
            case "norms by hand":
                q, k = (y * (y.pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt() for y in (q, k))
            case "unit vectors":
                q, k = (3 * nn.functional.normalize(y, dim=-1) for y in (q, k))
            case "a norm for each head":
                q = self.norm(q) * torch.tensor([1.0, 2.0]).to(x)[:, None, None]
            case "complex phases":
                angle = torch.arange(n).to(x)[:, None] * torch.tensor([1.0, 0.1]).to(x)
                turn = torch.polar(torch.ones_like(angle), angle)
                q, k = (torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (2, 2))) * turn).flatten(-2) for y in (q, k))
            case "other phases":
                q, k = (_turned(y, speed) for y, speed in ((q, 1.0), (k, 0.5)))
            case "einsum":
                q = torch.einsum("bnd,hdk->bhnk", x, self.weight)
            case "scaled":
                q, v = 0.3 * q, v * torch.tensor([1.0, 2.0]).to(x)[:, None, None]
            case "three axes":
                q, k, v = (y.flatten(0, 1) for y in (q, k, v))
            case "no projection of keys":
                k = x.unflatten(-1, (2, 4)).transpose(1, 2)
            case "low rank":
                q = self.q(0.1 * self.gate(x)).unflatten(-1, (2, 4)).transpose(1, 2)
        o = nn.functional.scaled_dot_product_attention(q, k, v, bias)
        o = o.reshape(len(x), self.heads, n, -1).transpose(1, 2).flatten(2)
        if self.what == "gated":
            o = o * torch.sigmoid(self.gate(x))
        if self.what == "heads with norms":
            o = self.norm(o.unflatten(-1, (2, 4))).flatten(2)
        if self.what == "convolution":
            return nn.functional.conv1d(o.mT, self.o.weight[:, :, None], self.o.bias).mT
        return self.o(o)


def _turned(y: Tensor, speed: float) -> Tensor:
    angle = speed * torch.arange(y.shape[-2])[:, None] * torch.tensor([1.0, 0.1])
    turn = hs.Rotary(angle.cos().to(y), angle.sin().to(y))
    return turn.turn(y)


def recorded(module: nn.Module, n: int = 6) -> Program:
    torch.manual_seed(0)
    return record(nn.Sequential(module).double(), (tokens(1, n, 8),))


FORMS = [
    "plain", "norms", "norms by hand", "unit vectors", "complex phases", "einsum", "scaled", "three axes",
    "no projection of keys", "low rank", "convolution",
]  # fmt: skip
OTHERS = [
    "clipped", "rectified", "temperature", "shifted values", "shifted keys and values", "values with norms",
    "biased by its tokens", "places in queries and keys", "a norm for each head", "other phases", "gated", "heads with norms",
]  # fmt: skip


@pytest.mark.parametrize("what", FORMS)
def test_forms(what: str):
    torch.manual_seed(0)
    module = Plain(what)
    attn = check(recorded(module))
    assert attn.heads == 2
    norm = {"norms": hs.LayerNorm, "norms by hand": hs.RMSNorm, "unit vectors": hs.RMSNorm}.get(what)
    assert (type(attn.q_norm) is norm) if norm else attn.q_norm is None
    assert (attn.rotary is not None) == (what == "complex phases")
    if what == "norms by hand":
        assert attn.q_norm is not None
        assert attn.q_norm.eps == 1e-3


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_no_such_form_is_refused(what: str):
    with pytest.raises(BadInputError, match=r"^expected .* got .*; measure"):
        closed(recorded(Plain(what)))


@pytest.mark.parametrize("n", [1, 2, 3, 30])
def test_few_tokens_and_many(n: int):
    check(recorded(Plain("norms"), n))


def test_padding_is_refused():
    with pytest.raises(BadInputError, match="padding"):
        closed(recorded(Plain("padded")))


class LowRank(nn.Module):
    """A matrix with a low-rank addition, as adapters have it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


@pytest.mark.parametrize("side", ["q", "o"])
def test_adapters_are_part_of_the_weights(side: str):
    module: Any = Plain()
    adapter = LowRank(getattr(module, side))
    setattr(module, side, adapter)
    attn = check(recorded(module))
    whole = adapter.base.weight + 2 * adapter.up.weight @ adapter.down.weight
    assert off(getattr(attn, f"w_{side}"), whole.detach()) <= 1e-12


class Torch(nn.Module):
    """Torch's own module."""

    def __init__(self, **options: Any):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("options", [{"batch_first": True}, {}, {"bias": False, "batch_first": True}])
def test_torchs_own_module(options: dict[str, Any]):
    torch.manual_seed(0)
    module = Torch(**options).double()
    for p in module.parameters():
        nn.init.normal_(p)
    x = tokens(1, 5, 8) if options.get("batch_first") else tokens(5, 1, 8)
    attn, truth = check(record(module, (x,))), hs.Attention.from_module(module.attention)
    for side in ("w_q", "w_k", "w_v", "w_o", "b_q", "b_v", "b_o"):
        ours, theirs = getattr(attn, side), getattr(truth, side)
        assert ours is None if theirs is None else torch.equal(ours, theirs), side


def test_weights_that_are_zero_hide_nothing():
    module = Plain("norms")
    nn.init.zeros_(module.v.weight)
    nn.init.zeros_(module.o.weight)
    program = recorded(module)
    attn, x, _ = closed(program)
    assert attn.heads == 2
    assert not bool(attn.w_v.any())
    assert agree(attn(x), module(x[None])[0].detach())


def test_keys_of_one_head():
    config = t.LlamaConfig(**{**GROUPED, "num_key_value_heads": 1}, **TOKENS)
    model = randomize(t.LlamaModel(config)).double()
    attn = check(record(model, (), {"input_ids": ids(), "use_cache": False}), 1)
    assert (attn.heads, attn.kv_heads) == (4, 1)


def test_sides_are_todays():
    """Weights that change after the recording count."""
    module = Plain()
    program = recorded(module)
    with torch.no_grad():
        module.q.weight.mul_(2)
    assert torch.equal(closed(program)[0].w_q, module.q.weight)
