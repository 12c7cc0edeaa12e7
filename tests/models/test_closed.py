"""Layers of models as `Attention`: read off, equal to the model's own layer, bounded by theory; and what is refused."""

import warnings
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.models import FallbackWarning
from howsmooth.models.capture import Capture
from marks import first
from problems.zoo import GROUPED, SMALL, TOKENS, ZOO, ids, randomize

t: Any = transformers
REFUSED = ("deberta-v2", "swin v2 plain", "swin v2 shifted")  # attention of its own, or over windows
BIG = {**SMALL, "hidden_size": 24, "max_position_embeddings": 64, **TOKENS}
SHAPES: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500000.0,
}

# other shapes and other phases than in the zoo
MORE = {
    "llama, one key head": lambda: t.LlamaModel(t.LlamaConfig(**{**BIG, "num_attention_heads": 4}, num_key_value_heads=1)),
    "llama, wide heads, biases": lambda: t.LlamaModel(t.LlamaConfig(**{**BIG, **SHAPES}, attention_bias=True)),
    "llama, yarn": lambda: t.LlamaModel(t.LlamaConfig(**{**BIG, **SHAPES}, rope_parameters=YARN)),
    "llama 3.1": lambda: t.LlamaModel(t.LlamaConfig(**{**BIG, **SHAPES}, rope_parameters=LLAMA3)),
    "qwen3, wide heads": lambda: t.Qwen3Model(t.Qwen3Config(**{**BIG, **SHAPES})),
    "phi, biases": lambda: t.PhiModel(t.PhiConfig(**{**BIG, "hidden_size": 40}, partial_rotary_factor=0.5)),
    "gpt-neox, wide": lambda: t.GPTNeoXModel(t.GPTNeoXConfig(**BIG, rotary_pct=0.5)),
    "gptj": lambda: t.GPTJModel(
        t.GPTJConfig(n_embd=24, n_layer=2, n_head=2, n_inner=24, vocab_size=40, n_positions=64, rotary_dim=6, **TOKENS)
    ),
    "cohere": lambda: t.CohereModel(t.CohereConfig(**BIG, num_key_value_heads=1)),
    "phi3": lambda: t.Phi3Model(t.Phi3Config(**BIG, num_key_value_heads=1)),
    "stablelm": lambda: t.StableLmModel(t.StableLmConfig(**BIG, num_key_value_heads=1, partial_rotary_factor=0.5)),
    "glm": lambda: t.GlmModel(t.GlmConfig(**{**BIG, **SHAPES}, partial_rotary_factor=0.4)),
    "granite": lambda: t.GraniteModel(t.GraniteConfig(**BIG, num_key_value_heads=1, attention_multiplier=0.3)),
    "olmo2, one key head": lambda: t.Olmo2Model(t.Olmo2Config(**BIG, num_key_value_heads=1)),
}


@cache
def captured(name: str) -> tuple[Capture, int]:
    """A model in float64 at an input, and the layer to look at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name in MORE:
            return hs.load(randomize(MORE[name](), scale=0.25).double()).capture(ids=ids(n=11)), 1
        animal = ZOO[name]
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in animal.inputs().items()}
        return hs.load(randomize(animal.build(), scale=animal.scale).double(), side=animal.side).capture(
            inputs=inputs
        ), animal.layer


@pytest.mark.slow
@pytest.mark.parametrize("name", first([*MORE, *(name for name in ZOO if name not in REFUSED)], 28))
def test_equals_the_models_own_layer(name: str):
    capture, layer = captured(name)
    attn, x, cut = capture.attention(layer), capture.tokens(layer), capture.map(layer)
    assert cut.on_kernels
    value = cut.to(torch.float64).value(x[None])[0]
    assert float((attn(x) - value).abs().max()) <= 1e-9 * float(value.abs().max())
    measured = hs.lipschitz(cut, x, solver=hs.DenseSVD()).value
    assert hs.lipschitz(attn, x, solver=hs.DenseSVD()).value == pytest.approx(measured, rel=1e-6)
    at = hs.bounds(attn, x)
    assert at.upper is not None or attn.kind != hs.kinds.Softmax()
    over = hs.bounds(attn, n=len(x), radius=float(x.norm(dim=-1).max()))
    for bound in (*at.rows, *over.rows):
        assert bound.value is None or bound.side == "lower" or bound.value >= measured * (1 - 1e-9), bound
    if attn.kind == hs.kinds.Softmax():
        s = hs.splitting(attn, x, solver=hs.DenseSVD())
        assert s.moved.value == pytest.approx(measured, rel=1e-6)


def test_sinks_are_the_models_own():
    capture, layer = captured("gpt-oss local")
    sink: Any = capture.sample.owner.get_submodule(capture.names[layer]).sinks
    attn = capture.attention(layer)
    assert attn.kind == hs.kinds.Softmax(sink.detach())
    assert (attn.causal, attn.window) == (True, 4)
    heads = capture.measure(layer, heads=True).heads
    for h, alone in enumerate(heads):
        assert hs.lipschitz(attn.head(h), capture.tokens(layer)).value == pytest.approx(alone.value, rel=1e-9)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::howsmooth.models.FallbackWarning")
def test_attention_of_its_own_is_refused(name: str):
    capture, layer = captured(name)
    with pytest.raises(BadInputError, match=r"got .*Attention"):
        capture.attention(layer)
    assert capture.closed(layer) is None


def test_weights_are_the_models_own():
    capture, layer = captured("llama")
    attn, module = capture.attention(layer), capture.sample.owner.get_submodule(capture.names[layer])
    for name in "qkvo":
        weight: Any = module.get_submodule(f"{name}_proj").weight
        assert torch.equal(getattr(attn, f"w_{name}"), weight)
    assert attn.b_q is None
    assert (attn.kv_heads, attn.heads, attn.head_width) == (2, 4, 6)
    assert attn.rotary is not None
    positions, speed = torch.arange(8)[:, None], 10000.0 ** (-torch.arange(0, 6, 2) / 6)
    assert float((attn.rotary.cos - torch.cos(positions * speed)).abs().max()) < 1e-6


def test_phases_are_those_of_the_positions():
    """Positions handed in by the user, not counted from 0."""
    capture, layer = captured("llama")
    model = hs.load(capture.sample.owner)
    places = torch.tensor([[3, 4, 9, 10, 11, 2, 30, 31]])
    moved = model.capture(input_ids=ids(), position_ids=places)
    attn = moved.attention(layer)
    assert hs.lipschitz(attn, moved.tokens(layer)).value == pytest.approx(moved.measure(layer).value, rel=1e-9)
    assert attn.rotary is not None
    turn = torch.complex(attn.rotary.cos, attn.rotary.sin)
    speed = 10000.0 ** (-torch.arange(0, 6, 2) / 6)
    between = (turn[2] / turn[0]).angle() - 6 * speed
    assert float(torch.sin(between / 2).abs().max()) < 1e-6


class Gated(nn.Module):
    """Attention with something that is no part of the formula."""

    def __init__(self, what: str):
        super().__init__()
        self.what = what
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.gate = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.what == "clipped":
            k = k.clamp(-0.5, 0.5)
        if self.what == "temperature":
            q = q * torch.linspace(1, 2, x.shape[1])[:, None]
        if self.what == "shifted values":
            v = v.roll(1, -2)
        bias = self.gate(x)[:, None, :, :1].expand(-1, -1, -1, x.shape[1]).mT if self.what == "biased by its tokens" else None
        o = nn.functional.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2)
        if self.what == "gated":
            o = o * torch.sigmoid(self.gate(x))
        return self.o(o)


@pytest.mark.parametrize("what", ["plain", "clipped", "temperature", "shifted values", "gated", "biased by its tokens"])
@pytest.mark.filterwarnings("ignore::howsmooth.models.FallbackWarning")
def test_what_is_no_formula_is_refused(what: str):
    torch.manual_seed(0)
    model = hs.load(nn.Sequential(Gated(what)).double())
    capture = model.capture(inputs=torch.randn(1, 6, 8))
    if what == "plain":
        assert capture.attention(0).heads == 2
        return
    with pytest.raises(BadInputError, match=r"^expected .* got .*; measure"):
        capture.attention(0)
    assert capture.closed(0) is None
    capture.measure(0)


class Wrapped(nn.Module):
    """A matrix with a low-rank addition, as adapters have it."""

    def __init__(self, base: nn.Module, d: int):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(d, 2, bias=False), nn.Linear(2, d, bias=False)

    @property
    def weight(self) -> Any:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


def test_adapters_are_part_of_the_weights():
    torch.manual_seed(0)
    module: Any = Gated("plain")
    module.q = Wrapped(module.q, 8)
    capture = hs.load(nn.Sequential(module).double()).capture(inputs=torch.randn(1, 6, 8))
    attn = capture.attention(0)
    weight = dict(module.q.named_parameters())
    assert torch.allclose(attn.w_q, weight["base.weight"] + 2 * weight["up.weight"] @ weight["down.weight"], atol=1e-12)
    assert hs.lipschitz(attn, capture.tokens(0)).value == pytest.approx(capture.measure(0).value, rel=1e-9)


def test_a_module_without_matrices_of_its_own():
    """`nn.MultiheadAttention` keeps its weights in one parameter and calls no module."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True).double()
    module.out_proj.bias.data.normal_()
    capture = hs.load(module).capture(inputs=torch.randn(1, 5, 8))
    attn, truth = capture.attention(0), hs.Attention.from_module(module)
    assert truth.w_k is not None
    for ours, theirs in zip((attn.w_k, attn.w_o, attn.b_o), (truth.w_k, truth.w_o, truth.b_o), strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_kept_within_a_budget(monkeypatch: pytest.MonkeyPatch):
    from howsmooth.models import closed

    config = t.LlamaConfig(**GROUPED, **TOKENS)
    capture = hs.load(randomize(t.LlamaModel(config))).capture(ids=ids())
    first = capture.closed(0)
    assert first is not None
    assert capture.closed(0) is first
    monkeypatch.setattr(closed, "_MOST", first.nbytes)
    assert capture.closed(1) is not None
    assert capture.closed(0) is not first  # read off again, and the same
    again = capture.closed(0)
    assert again is not None
    assert torch.equal(again.w_q, first.w_q)


@pytest.mark.slow
def test_windows_of_a_rotary_model_share_a_closed_form():
    capture, layer = captured("qwen3")
    model = hs.load(capture.sample.owner)
    windows = [ids(seed=s, n=n)[0].tolist() for s, n in ((0, 8), (1, 8), (2, 5), (3, 12))]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        together = model.capture(windows).measure([layer])
    for window, m in zip(windows, together, strict=True):
        assert m.value == pytest.approx(model.measure(ids=window, layer=layer).value, rel=1e-6)


class Masked(nn.Module):
    """Attention with the mask it is given."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.inner(x).chunk(3, -1))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(heads.transpose(1, 2).flatten(2))


class Packed(nn.Module):
    """Documents end at id 0 and do not attend to each other, as in packed training; with `bias` they do so less."""

    def __init__(self, bias: bool):
        super().__init__()
        self.bias = bias
        self.embedding, self.attention = nn.Embedding(16, 8), Masked()

    def mask(self, input_ids: Tensor) -> Tensor:
        document = (input_ids == 0).cumsum(-1)
        same = (document[:, :, None] == document[:, None])[:, None]
        return torch.where(same, 0.0, -2.0).to(self.embedding.weight) if self.bias else same

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.attention(self.embedding(input_ids), self.mask(input_ids))


@pytest.mark.parametrize("bias", [False, True])
def test_windows_of_one_length_keep_their_own_masks(bias: bool):
    module = randomize(Packed(bias)).double()
    windows = [[1, 2, 3, 4, 5, 6], [1, 0, 3, 0, 5, 6], [0, 2, 0, 4, 0, 6]]
    for window, m in zip(windows, hs.load(module).capture(windows).measure([0]), strict=True):
        tokens = torch.tensor([window])
        x, mask = module.embedding(tokens).detach(), module.mask(tokens)
        dense = torch.autograd.functional.jacobian(lambda t, mask=mask: module.attention(t, mask), x)
        assert isinstance(dense, Tensor)
        assert m.value == pytest.approx(float(torch.linalg.matrix_norm(dense.reshape(48, 48), 2)), rel=1e-6)
