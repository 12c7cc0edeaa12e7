"""Attention read off torch's own module, and taken apart by heads."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from checks import assert_close, jacobians
from howsmooth import Attention, LayerNorm, Rotary
from howsmooth.errors import BadInputError
from problems.layers import gaussian, turned

N, D = 5, 6


def module(heads: int, **options) -> nn.MultiheadAttention:
    made = nn.MultiheadAttention(D, heads, batch_first=True, dtype=torch.float64, **options).eval()
    with torch.no_grad():
        for i, t in enumerate(made.parameters()):
            t.copy_(gaussian(*t.shape, seed=i))
    return made


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 6])
def test_equals_the_module(heads, bias, causal):
    theirs = module(heads, bias=bias)
    ours = Attention.from_module(theirs, causal=causal)
    mask = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64) if causal else None

    def f(t: Tensor) -> Tensor:
        return theirs(t, t, t, attn_mask=mask, need_weights=False, is_causal=causal)[0]

    x = gaussian(2, N, D, seed=9) / 4
    growth = 1 + float(x.norm()) ** 2
    assert_close(ours(x), f(x).detach(), growth=growth)
    assert_close(ours.linearize(x)[1].dense(), jacobians(f, x), growth=growth)
    assert (ours.b_q is None) == (ours.b_o is None) == (not bias)


def test_dropout_plays_no_part_and_weights_stay_the_module_s():
    theirs = module(2, dropout=0.5)
    ours, x = Attention.from_module(theirs.train()), gaussian(N, D, seed=9)
    assert_close(ours(x), Attention.from_module(theirs.eval())(x))
    assert not ours.w_q.requires_grad
    assert theirs.in_proj_weight is not None
    assert theirs.in_proj_weight.requires_grad


@pytest.mark.parametrize(
    "other",
    [
        lambda: nn.MultiheadAttention(D, 2, kdim=4),
        lambda: nn.MultiheadAttention(D, 2, vdim=4),
        lambda: nn.MultiheadAttention(D, 2, add_bias_kv=True),
        lambda: nn.MultiheadAttention(D, 2, add_zero_attn=True),
        lambda: nn.Linear(D, D),
        lambda: "attention",
    ],
    ids=["kdim", "vdim", "bias tokens", "a zero token", "another module", "no module"],
)
def test_what_is_not_plain_self_attention_is_refused(other):
    with pytest.raises(BadInputError, match=r"^expected .* got .*howsmooth\.load"):
        Attention.from_module(other())


def grouped() -> Attention:
    shapes = ((8, D), (4, D), (6, D), (7, 12))
    w_q, w_k, w_v, w_o = (gaussian(*s, seed=i) for i, s in enumerate(shapes))
    b_q, b_k, b_v, b_o = (gaussian(s, seed=10 + i) for i, s in enumerate((8, 4, 6, 7)))
    return Attention(w_q, w_k, w_v, w_o, heads=4, kv_heads=2, b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o)


LAYERS = {
    "module": lambda: Attention.from_module(module(3)),
    "grouped": grouped,
    "one bias per head": lambda: replace(grouped(), bias=gaussian(1, 4, N, N, seed=5), causal=True),
    "one bias for all": lambda: replace(grouped(), bias=gaussian(1, 1, N, N, seed=5), softcap=2.0),
    "norms and phases": lambda: turned(grouped(), N, q=1, k=2, phases=1, seed=3),
    "padding": lambda: replace(grouped(), attention_mask=torch.tensor([[True, True, True, False, False]])),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_sum_of_its_heads(name):
    layer = LAYERS[name]()
    x = gaussian(1, N, D, seed=9) / 2
    alone = [layer.head(h) for h in range(layer.heads)]
    assert all(f.b_o is None and f.heads == f.kv_heads == 1 for f in alone)
    assert layer.b_o is not None
    assert_close(sum((f(x) for f in alone), start=layer.b_o), layer(x), growth=20)
    products = sum((f.linearize(x)[1].dense() for f in alone), start=torch.zeros(()).double())
    assert_close(products, layer.linearize(x)[1].dense(), growth=20)


def test_heads_without_an_output_projection_lie_side_by_side():
    layer = replace(grouped(), w_o=None, b_o=None)
    x = gaussian(N, D, seed=9)
    assert_close(torch.cat([layer.head(h)(x) for h in range(4)], -1), layer(x), growth=20)


@pytest.mark.parametrize("index", [-1, 4, 1.0, True, None])
def test_heads_that_a_layer_has_not(index):
    with pytest.raises(BadInputError, match=r"^expected a head from 0 to 3"):
        grouped().head(index)


def test_weights_by_head_are_those_of_the_heads():
    tokens_are_keys = Attention(gaussian(D, D, seed=0), None, gaussian(4, D, seed=1))
    for layer in (grouped(), replace(grouped(), w_o=None, b_o=None), tokens_are_keys):
        whole = layer.by_head()
        assert {t.dtype for t in whole} == {torch.float64}
        for h in range(layer.heads):
            part = layer.head(h).by_head()
            for name in ("q", "k", "v", "b_q", "b_k"):
                assert torch.equal(getattr(whole, name)[h], getattr(part, name)[0]), name
            if layer.w_o is not None:
                assert torch.equal(whole.o[h], part.o[0])


def test_a_layer_prints_what_it_is():
    assert repr(grouped()) == "Attention(6 → 7, 4 heads of 2, 2 for keys and values, float64)"
    assert repr(grouped().head(1).to(torch.float32)) == "Attention(6 → 7, 1 head of 2, float32)"
    full = replace(turned(grouped(), N, q=1, k=2, phases=1, seed=3), causal=True, window=3)
    assert repr(full).endswith("2 for keys and values, causal, window 3, q_norm, k_norm, rotary, float64)")
    assert repr(Rotary.from_base(4, 9)) == "Rotary(9 positions, 2 planes)"
    assert repr(Rotary.from_base(4, 9, interleaved=True)) == "Rotary(9 positions, 2 planes, interleaved)"
    assert repr(LayerNorm(torch.ones(4))) == "LayerNorm(4, eps=1e-05, float32)"
