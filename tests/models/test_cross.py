"""Cross-attention as a map of its own, in the tokens that ask and in the context that is looked at."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn

import howsmooth as hs
from checks import PARITY
from howsmooth.errors import BadInputError
from howsmooth.models import FallbackWarning
from problems.zoo import TOKENS, VOCABULARY, double_softmax, ids, randomize

t: Any = transformers


class Across(nn.Module):
    """Attention of a diffusion model's kind: queries from a picture, keys and values from a text of another width."""

    def __init__(self, width: int = 12, context: int = 7, heads: int = 3, by_hand: bool = False):
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.to_q, self.to_k, self.to_v = nn.Linear(width, 9), nn.Linear(context, 9), nn.Linear(context, 9)
        self.to_out = nn.Linear(9, width)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, x in ((self.to_q, hidden_states), (self.to_k, context), (self.to_v, context))
        )
        fused = nn.functional.scaled_dot_product_attention
        o = torch.softmax(q @ k.mT / 3**0.5, -1) @ v if self.by_hand else fused(q, k, v)
        return self.to_out(o.transpose(1, 2).flatten(2))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A model with cross-attention: the path of its module, of the output projection, what the context is called there.

    {} is the layer; nothing for the projection where it is part of the module.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    module: str
    projection: str
    name: str | int
    side: str | None = None
    layer: int = 1
    context: int = 5
    cut: bool = True


def decoded(width: int, n: int = 5) -> dict[str, Any]:
    return {"input_ids": ids(), "encoder_hidden_states": random(1, n, width, seed=3)}


SHARED: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
SHARED |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": VOCABULARY, **TOKENS}
CASES = {
    "t5": Case(
        lambda: t.T5Model(t.T5Config(d_model=16, d_kv=6, d_ff=24, num_layers=2, num_heads=2, vocab_size=VOCABULARY)),
        lambda: decoded(16),
        "block.{}.layer.1.EncDecAttention",
        "block.{}.layer.1.EncDecAttention.o",
        "key_value_states",
        "decoder",
    ),
    "t5, as many as tokens": Case(
        lambda: t.T5Model(t.T5Config(d_model=16, d_kv=6, d_ff=24, num_layers=2, num_heads=2, vocab_size=VOCABULARY)),
        lambda: decoded(16, 8),
        "block.{}.layer.1.EncDecAttention",
        "block.{}.layer.1.EncDecAttention.o",
        "key_value_states",
        "decoder",
        context=8,
    ),
    "bart": Case(
        lambda: t.BartModel(t.BartConfig(**SHARED, max_position_embeddings=32)),
        lambda: decoded(16),
        "layers.{}.encoder_attn",
        "layers.{}.encoder_attn.out_proj",
        "key_value_states",
        "decoder",
    ),
    "whisper": Case(
        lambda: t.WhisperModel(
            t.WhisperConfig(
                **SHARED, num_mel_bins=8, max_source_positions=10, max_target_positions=32, decoder_start_token_id=1
            )
        ),
        lambda: decoded(16),
        "layers.{}.encoder_attn",
        "layers.{}.encoder_attn.out_proj",
        "key_value_states",
        "decoder",
    ),
    "torch decoder layer": Case(
        lambda: nn.TransformerDecoderLayer(8, 2, 12, batch_first=True),
        lambda: (random(1, 6, 8), random(1, 5, 8, seed=1)),
        "multihead_attn",
        "multihead_attn",
        1,
        layer=0,
    ),
    "torch decoder layer, as many": Case(
        lambda: nn.TransformerDecoderLayer(8, 2, 12, batch_first=True),
        lambda: (random(1, 6, 8), random(1, 6, 8, seed=1)),
        "multihead_attn",
        "multihead_attn",
        1,
        layer=0,
        context=6,
    ),
    "a module alone": Case(
        Across,
        lambda: {"hidden_states": random(1, 6, 12), "encoder_hidden_states": random(1, 5, 7, seed=1)},
        "",
        "to_out",
        "encoder_hidden_states",
        layer=0,
    ),
    "by hand": Case(
        lambda: Across(by_hand=True),
        lambda: {"hidden_states": random(1, 6, 12), "encoder_hidden_states": random(1, 5, 7, seed=1)},
        "",
        "to_out",
        "encoder_hidden_states",
        layer=0,
    ),
}


def truth(model: nn.Module, inputs: Any, case: Case, map: str) -> tuple[Tensor, Tensor]:
    """What enters, and the dense Jacobian, from the model's own plain code: hooks and autograd alone."""
    module = model.get_submodule(case.module.format(case.layer))
    end = model.get_submodule(case.projection.format(case.layer))
    moved: list[Tensor] = []
    entered: list[Tensor] = []
    left: list[Tensor] = []

    def enter(_: nn.Module, args: tuple, kwargs: dict) -> tuple:
        given, key = list(args), case.name if map == "context" else "hidden_states" if "hidden_states" in kwargs else 0
        place: Any = given if isinstance(key, int) else kwargs
        entered.append(place[key].detach())
        if moved:
            value, old = moved[0].reshape(place[key].shape), place[key]
            given = [value if a is old else a for a in given]
            kwargs = {k: value if a is old else a for k, a in kwargs.items()}
        return tuple(given), kwargs

    def leave(_: nn.Module, args: tuple, output: Any) -> None:
        left.append(output if isinstance(output, Tensor) else output[0])

    def run() -> Tensor:
        left.clear()
        model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        return left[-1]

    with (
        mock.patch.object(nn.functional, "softmax", double_softmax),
        module.register_forward_pre_hook(enter, with_kwargs=True),
        end.register_forward_hook(leave),
    ):
        with torch.no_grad():
            run()
        x = entered[0].flatten(0, -2)

        def f(tokens: Tensor) -> Tensor:
            moved[:] = [tokens]
            return run().flatten(0, -2)

        jacobian = torch.autograd.functional.jacobian(f, x)
    assert isinstance(jacobian, Tensor)
    return x, jacobian.reshape(jacobian.shape[0] * jacobian.shape[1], -1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("map", ["cross", "context"])
def test_equals_the_dense_jacobian(name: str, map: Any):
    case = CASES[name]
    torch.manual_seed(0)
    built = randomize(case.build(), scale=0.4).double()
    model = hs.load(built, side=case.side)
    inputs = case.inputs()
    module: Any = model.module
    if case.side:
        module.set_attn_implementation("eager")
    x, jacobian = truth(module, inputs, case, map)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = model.capture(inputs=inputs).measure(case.layer, map)
    assert any(issubclass(w.category, FallbackWarning) for w in caught) != case.cut
    assert got.cut == case.cut
    assert got.n == len(x) == (case.context if map == "context" else got.n)
    assert got.value == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)), rel=PARITY)
    assert got.radius_rms == pytest.approx(float(x.norm() / len(x) ** 0.5), rel=PARITY)
    assert len(got.input_share) == len(x)
    if map == "context":
        assert got.tokens == tuple(str(i) for i in range(len(x)))
        assert not case.cut or (got.received is not None and sum(got.received) == pytest.approx(1))


@pytest.mark.slow
def test_heads_of_cross_attention():
    """One head is the layer with the columns of the other cut off; self-attention in front keeps all of its own."""
    case = CASES["t5"]
    model = hs.load(randomize(case.build()).double(), side="decoder")
    module: Any = model.module
    module.set_attn_implementation("eager")
    weight = module.get_submodule(case.projection.format(1)).weight
    capture, kept = model.capture(inputs=case.inputs()), weight.detach().clone()
    for map in ("cross", "context"):
        got = capture.measure(1, map, heads=True)
        for h in (0, 1):
            weight.data.zero_()[:, 6 * h : 6 * h + 6] = kept[:, 6 * h : 6 * h + 6]
            _, jacobian = truth(module, case.inputs(), case, map)
            weight.data.copy_(kept)
            assert got.heads[h].value == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)), rel=PARITY)
            assert capture.measure(1, map, head=h).value == pytest.approx(got.heads[h].value, rel=1e-9)
    with pytest.raises(BadInputError, match="expected a head from 0 to 1, got 2"):
        capture.measure(1, "context", head=2)


def test_self_attention_stays_what_it_was():
    """Cross-attention is no layer of its own where there is self-attention, whatever the lengths."""
    for context in (5, 6):
        layer = nn.TransformerDecoderLayer(8, 2, 12, batch_first=True).double().eval()
        capture = hs.load(layer).capture(inputs=(random(1, 6, 8), random(1, context, 8, seed=1)))
        assert capture.names == ("self_attn",)


def test_refused_in_one_sentence():
    model = hs.load(randomize(t.GPT2Model(t.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=VOCABULARY, **TOKENS))))
    for map in ("cross", "context"):
        with pytest.raises(BadInputError, match=r"^expected a block with cross-attention, got h.0, .*encoder_hidden_states"):
            model.measure(ids=[3, 4, 5], layer=0, map=map)
    case = CASES["bart"]
    decoder = hs.load(randomize(case.build()).double(), side="decoder")
    mask = torch.tensor([[1] * 6 + [0] * 2])
    padded = decoder.capture(**decoded(16), attention_mask=mask)
    with pytest.raises(BadInputError, match="without padding for map 'context'"):
        padded.measure(0, "context")
    assert padded.measure(0, "cross").n == 6
