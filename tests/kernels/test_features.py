"""Linear attention whose features underflow: right where a factor saves them, refused where none does."""

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.kernels import Mask, Scores, linearize
from howsmooth.kernels.kinds import Linear
from howsmooth.maps import Attention

F64 = torch.float64
ONE = torch.ones(1, 1, dtype=F64)


def log_features(t: Tensor) -> Tensor:
    return torch.where(t > 0, t.clamp_min(0.0).log1p(), t)


def own_value(attn: Attention, x: Tensor) -> Tensor:
    """The layer with logarithms of its weights, which do not underflow."""
    q, k, v = attn.vectors(x[None])
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    s = (log_features(q)[..., :, None, :] + log_features(k)[..., None, :, :]).logsumexp(-1)
    if attn.causal:
        s = s.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    return attn.finish(s.softmax(-1) @ v)[0]


def own_jacobian(attn: Attention, x: Tensor) -> Tensor:
    out = attn.out_width * len(x)
    return torch.autograd.functional.jacobian(lambda t: own_value(attn, t), x).reshape(out, x.numel())  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]


@pytest.mark.parametrize("w", [-300.0, -600.0, -1e5, 300.0])
def test_weights_whose_features_underflow(w: float):
    attn, x = Attention(w * ONE, w * ONE, ONE, ONE, kind=Linear()), torch.tensor([[1.0], [2.0]], dtype=F64)
    truth = float(torch.linalg.matrix_norm(own_jacobian(attn, x), ord=2))
    estimate = hs.lipschitz(attn, x)
    assert truth == pytest.approx(math.sqrt(2), rel=1e-6) or w > 0
    assert estimate.value <= truth * (1 + 1e-9) <= estimate.upper * (1 + 2e-9)
    assert estimate.value == pytest.approx(truth, rel=1e-6)
    assert truth <= (hs.bounds(attn, x).by_id("D7").value or 0.0) <= 4 * truth


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["dense", "blocked"])
def test_value_and_derivative_are_those_of_logarithms(kernel, causal: bool):
    g = torch.Generator().manual_seed(0)
    for far in (0.0, 30.0, 300.0, 900.0):
        w_q, w_k, w_v = (torch.randn(r, 3, generator=g, dtype=F64) for r in (8, 4, 4))
        shift = torch.randn(8, generator=g, dtype=F64) * far - far
        b_k = torch.randn(4, generator=g, dtype=F64) * far
        attn = Attention(
            w_q, w_k, w_v, heads=4, kv_heads=2, b_q=shift, b_k=b_k - b_k.max(), causal=causal, kind=Linear()
        )  # two entries a head; keys of one entry are near each other, entries far apart
        x = torch.randn(5, 3, generator=g, dtype=F64)
        made = linearize(*attn.vectors(x[None]), Scores(1.0, mask=Mask(causal=causal), kind=Linear()), kernel)
        assert torch.allclose(attn.finish(made.output)[0], own_value(attn, x), rtol=1e-10, atol=1e-12)
        assert torch.allclose(attn(x), own_value(attn, x), rtol=1e-10, atol=1e-12)
        truth = own_jacobian(attn, x)
        assert torch.allclose(attn.linearize(x[None])[1].dense()[0], truth, rtol=1e-9, atol=1e-11)
        norm = float(torch.linalg.matrix_norm(truth, ord=2))
        assert norm <= (hs.bounds(attn, x).by_id("D7").value or 0.0) * (1 + 1e-9)


def test_keys_that_underflow_beside_hidden_ones_are_refused():
    """The first query sees the first key alone, which is `e^{−900}` beside the second: no factor serves both rows."""
    attn = Attention(ONE, ONE, ONE, ONE, causal=True, kind=Linear())
    x = torch.tensor([[-900.0], [0.0]], dtype=F64)
    with pytest.raises(BadInputError, match="sums that underflow"):
        hs.lipschitz(attn, x)
    for kernel in ("dense", "blocked"):
        with pytest.raises(BadInputError, match="sums that underflow"):
            linearize(*attn.vectors(x[None]), Scores(1.0, mask=Mask(causal=True), kind=Linear()), kernel)
    assert attn(x).isnan().tolist() == [[True], [False]]


def test_small_sums_are_infinite_in_a_bound_or_right():
    """Squares underflow before sums do."""
    attn = Attention(ONE, ONE, ONE, ONE, causal=True, kind=Linear())
    for far, finite in ((-100.0, True), (-500.0, False)):
        x = torch.tensor([[far], [0.0], [far + 1]], dtype=F64)
        truth = float(torch.linalg.matrix_norm(own_jacobian(attn, x), ord=2))
        row = hs.bounds(attn, x).by_id("D7").value
        assert row is not None
        assert truth <= row
        assert math.isfinite(row) == finite


def test_products_that_are_not_normalised():
    """Their sizes count: what is too small for the precision is refused, what is not is as it was."""
    x = torch.tensor([[1.0], [2.0]], dtype=F64)
    with pytest.raises(BadInputError, match="sums that underflow"):
        hs.lipschitz(Attention(-400 * ONE, -400 * ONE, ONE, ONE, kind=Linear(normalized=False)), x)
    attn = Attention(-200 * ONE, -200 * ONE, ONE, ONE, kind=Linear(normalized=False))
    found = hs.lipschitz(attn, x).value * math.exp(400)

    def own(t: Tensor) -> Tensor:  # times e^400
        return torch.exp(-200 * (t + t.T) + 400) @ t

    J = torch.autograd.functional.jacobian(own, x).reshape(2, 2)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    truth = float(torch.linalg.matrix_norm(J, ord=2))
    assert found == pytest.approx(truth, rel=1e-9)
    row = hs.bounds(attn, x).by_id("D7").value
    assert truth <= (row or 0.0) * math.exp(400) <= 4 * truth
    # keys that underflow beside queries that are as large
    mixed = Attention(1e150 * ONE, 0 * ONE, ONE, ONE, b_k=-800 * torch.ones(1, dtype=F64), kind=Linear(normalized=False))
    log_weight = 150 * math.log(10) - 800
    assert mixed(x)[1].item() == pytest.approx(2 * 3 * math.exp(log_weight), rel=1e-9)


@pytest.mark.parametrize("kernel", ["dense", "blocked"])
def test_relu_features_may_vanish_but_not_underflow(kernel):
    apart, v = torch.eye(2, dtype=F64), torch.ones(2, 1, dtype=F64)
    scores = Scores(1.0, kind=Linear("relu"))
    zero = linearize(apart[None, None, :1], apart[None, None, 1:], v[None, None, :1], scores, kernel)
    assert zero.output.tolist() == [[[[0.0]]]]
    tiny = 1e-170 * torch.ones(1, 1, 2, 2, dtype=F64)
    with pytest.raises(BadInputError, match="sums that underflow"):
        linearize(tiny, tiny, v[None, None], scores, kernel)


def test_the_precision_decides():
    attn, x = Attention(ONE, ONE, ONE, ONE, causal=True, kind=Linear()), torch.tensor([[-80.0], [0.0]])
    with pytest.raises(BadInputError, match="float32"):
        attn.to(torch.float32).linearize(x[None])
    assert bool(attn.linearize(x.double()[None])[0].isfinite().all())
