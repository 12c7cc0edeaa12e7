"""Working precision: the wider of the weights' and the tokens', float32 at least."""

import pytest
import torch

from checks import assert_close
from howsmooth import Attention, LayerNorm, RMSNorm
from howsmooth.errors import BadInputError
from howsmooth.maps import Map
from problems.layers import gaussian

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def attention(dtype: torch.dtype) -> Attention:
    return Attention(
        *(gaussian(4, 4, seed=i, dtype=dtype) for i in range(4)),
        heads=2,
        b_q=gaussian(4, seed=5, dtype=dtype),
        bias=gaussian(1, 1, 3, 3, seed=6, dtype=dtype),
        attention_mask=torch.tensor([[True, True, False]]),
    )


MAPS = {
    "attention": attention,
    "layer norm": lambda dtype: LayerNorm(gaussian(4, seed=1, dtype=dtype), gaussian(4, seed=2, dtype=dtype)),
    "rms norm": lambda dtype: RMSNorm(gaussian(4, seed=1, dtype=dtype)),
    "composition": lambda dtype: attention(dtype) @ RMSNorm(gaussian(4, seed=1, dtype=torch.float16)),
}


def expected(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in (a, b) else torch.float32


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("weights", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", DTYPES, ids=str)
def test_promotion(name, weights, tokens):
    f: Map = MAPS[name](weights)
    x = gaussian(1, 3, 4, seed=9, dtype=tokens)
    ready = f.prepare(x)
    value, op = f.linearize(ready)
    want = expected(weights, tokens)
    assert ready.dtype == f(x).dtype == value.dtype == op.dtype == op.dense().dtype == want
    exact = f.to(torch.float64)
    growth = 1 + float(exact(x.double()).norm()) ** 2
    assert_close(f(x), exact(x.double()), want, growth=growth)
    assert_close(op.dense(), exact.linearize(x.double())[1].dense(), want, growth=growth)


@pytest.mark.parametrize("name", MAPS)
def test_to_makes_a_copy_in_another_precision(name):
    f: Map = MAPS[name](torch.float32)
    g = f.to(torch.float64)
    assert type(g) is type(f)
    assert (f.dtype, g.dtype) == (torch.float32, torch.float64)
    assert g.width == f.width == 4


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("args", [(torch.float64,), ("cpu", torch.float64), (torch.device("cpu"),), ("cpu",)], ids=str)
def test_to_is_named_as_for_a_tensor(name, args):
    f: Map = MAPS[name](torch.float32)
    assert f.to(*args).dtype == torch.zeros(1).to(*args).dtype
    assert f.to(dtype=torch.float64, device="cpu").dtype == torch.float64


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("args", [("attic",), (torch.int64,), ("cpu", torch.bool), ("cpu", "float64")], ids=str)
def test_to_refuses_what_is_no_place(name, args):
    with pytest.raises(BadInputError, match=r"^expected a (device|floating-point dtype)"):
        MAPS[name](torch.float32).to(*args)


@pytest.mark.parametrize("name", MAPS)
def test_maps_print_in_a_line_and_compare_as_objects_do(name):
    f, again = MAPS[name](torch.float32), MAPS[name](torch.float32)
    assert "\n" not in repr(f)
    assert len(repr(f)) < 128
    assert (f == f) is True
    assert (f == again) is False


def test_to_moves_every_tensor_and_keeps_the_mask():
    g = attention(torch.float32).to(torch.float64)
    assert g.attention_mask is not None
    assert g.bias is not None
    assert g.b_q is not None
    assert g.w_o is not None
    assert g.attention_mask.dtype == torch.bool
    assert all(t.dtype == torch.float64 for t in (g.w_q, g.w_v, g.w_o, g.b_q, g.bias))
    assert (g.heads, g.scale, g.causal) == (2, g.head_width**-0.5, False)
