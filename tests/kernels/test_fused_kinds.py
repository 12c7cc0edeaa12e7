"""The fused kernels of kinds beyond plain softmax, against tiles in float64: on a GPU where there is one, else interpreted."""

import pytest
import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels import AttentionKernel, Mask, Scores, linearize
from howsmooth.kernels.kinds import Hard, Sigmoid
from problems.kinds import kind_problem
from problems.layers import Problem, gaussian, key_mask

triton = pytest.importorskip("triton", reason="needs triton: pip install triton")

from howsmooth.kernels.triton import Fused, fused  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CORES = ["sink", "sigmoid", "l2"]  # kernels of their own
NAMES = [*CORES, "cosine", "differential"]
LIMITS = {"half": 2.5e-3, "mixed": 2.5e-3, "strict": 2e-5}  # a few of the operands' roundings; small problems average little


def relative(got: Tensor, want: Tensor, scale: float = 0.0) -> float:
    return float((got.double().cpu() - want).norm()) / max(float(want.norm()), scale, 1e-300)


def fused_and_true(p: Problem, precision: fused.Precision) -> tuple[AttentionKernel, AttentionKernel]:
    p = p.to(torch.float32).to(torch.float64)
    q, k, v = (t.float().to(DEVICE) for t in p.qkv)
    kernel = linearize(q, k, v, p.scores, "triton", precision)
    assert isinstance(getattr(kernel, "core", kernel), Fused)
    return kernel, linearize(*p.qkv, p.scores, "blocked")


def check(p: Problem, precision: fused.Precision, probes: int = 1, growth: float = 1.0) -> None:
    kernel, truth = fused_and_true(p, precision)
    # not the place itself: a norm has no derivative along it
    tangents = [gaussian(probes, *t.shape, seed=20 + i).float() for i, t in enumerate(p.qkv)]
    g = gaussian(probes, *truth.output.shape, seed=9).float()
    pairs = [
        (kernel.output, truth.output),
        (kernel.jvp(*(t.to(DEVICE) for t in tangents)), truth.jvp(*(t.double() for t in tangents))),
        *zip(kernel.vjp(g.to(DEVICE)), truth.vjp(g.double()), strict=True),
        (kernel.attention_received(), truth.attention_received()),
    ]
    size = float(pairs[4][1].norm())  # of dv: queries and keys may have a derivative of zero
    for i, (got, want) in enumerate(pairs):
        assert got.shape == want.shape
        limit = 1e-5 if i == 0 else LIMITS[precision]
        assert relative(got, want, size if i in (2, 3) else 0.0) <= limit * growth, f"{precision}, pair {i}"
    for a, b in zip(kernel.logit_range(), truth.logit_range(), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["mixed", "strict"])
@pytest.mark.parametrize("name", CORES)
def test_every_precision(name, precision):
    shape = {"batch": 1, "heads": 2, "kv_heads": 1, "n": 20}
    check(kind_problem(name, **shape, d=16, d_v=8, mask=Mask(causal=True)), precision, probes=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_padding_and_grouped_heads(name):
    check(kind_problem(name, heads=2, kv_heads=1, n=20, d=16, d_v=8, mask=Mask(keys=key_mask(2, 20))), "half", probes=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("mask", [Mask(causal=True, window=50), Mask(bias=gaussian(1, 1, 150, 150, seed=3))])
def test_several_blocks(name, mask):
    check(kind_problem(name, batch=1, heads=1, kv_heads=1, n=150, d=16, d_v=16, mask=mask), "half", probes=2)


@pytest.mark.parametrize("name", ["sink", "sigmoid with a bias"])
def test_softcap(name):
    check(kind_problem(name, batch=1, heads=2, kv_heads=1, n=20, d=16, d_v=8, softcap=2.0, logit=5.0), "half")


@pytest.mark.parametrize("bias", [-60.0, -30.0, 30.0])
def test_sigmoids_of_any_size(bias):
    """Rows of sigmoids may all be small or all one: their unit is taken out before half precision loses them."""
    p = kind_problem("sigmoid", batch=1, heads=2, kv_heads=1, n=20, d=16, d_v=8)
    p = Problem(*p.qkv, Scores(p.scores.scale, kind=Sigmoid(bias)))
    kernel, truth = fused_and_true(p, "half")
    d = [gaussian(1, *t.shape, seed=i) for i, t in enumerate(p.qkv)]
    assert relative(kernel.output, truth.output) <= 1e-4
    assert relative(kernel.jvp(*(t.float().to(DEVICE) for t in d)), truth.jvp(*d)) <= LIMITS["half"]
    g = gaussian(1, *truth.output.shape, seed=9)
    want = truth.vjp(g)
    for a, b in zip(kernel.vjp(g.float().to(DEVICE)), want, strict=True):
        assert relative(a, b, float(want[2].norm())) <= LIMITS["half"]


@pytest.mark.parametrize("precision", ["half", "strict"])
@pytest.mark.parametrize("bias", [16.0, 36.0, 60.0])
def test_slopes_of_saturated_sigmoids(bias, precision):
    """`dS` goes through slopes of `exp(−bias)` beside weights of one; where values stay, it is all there is."""
    q, k, v = (gaussian(1, h, 20, d, seed=i) for i, (h, d) in enumerate([(2, 16), (1, 16), (1, 8)]))
    p = Problem(q / 16, k / 16, 1e4 * v, Scores(1.0, kind=Sigmoid(bias)))
    kernel, _ = fused_and_true(p, precision)
    q, k, v = (t.float().double().expand(1, 2, 20, t.shape[-1]) for t in p.qkv)
    dq, dk = (gaussian(1, *t.shape, seed=i).float() for i, t in enumerate((p.q, p.k), 5))
    e = torch.exp(-(q @ k.mT + bias))
    slope = e / (1 + e) ** 2
    moved = (slope * (dq.double() @ k.mT + q @ dk.double().mT)) @ v
    still = torch.zeros(1, *p.v.shape, device=DEVICE)
    assert relative(kernel.jvp(dq.to(DEVICE), dk.to(DEVICE), still), moved) <= LIMITS[precision]
    g = gaussian(1, 1, 2, 20, 8, seed=9).float()
    ds = slope * (g.double() @ v.mT)
    got = kernel.vjp(g.to(DEVICE))
    assert relative(got[0], ds @ k) <= LIMITS[precision]
    assert relative(got[1], (ds.mT @ q).sum(2, keepdim=True)) <= LIMITS[precision]


@pytest.mark.parametrize("precision", ["half", "strict"])
@pytest.mark.parametrize("name", ["softmax", "sink"])
@pytest.mark.parametrize("offset", [-1e9, 1e9, torch.finfo(torch.float32).min])
def test_rows_that_share_an_offset(offset, name, precision):
    """Beside which logits have no digits: their weights are equal, or those of the sink, and sum to one in products too."""
    bias = torch.zeros(1, 1, 9, 9)
    bias[..., :3, :] = offset
    bias[..., 3, 4:] = offset
    p = kind_problem(name, batch=1, heads=2, kv_heads=1, n=9, d=16, d_v=8, mask=Mask(bias=bias)).to(torch.float32)
    q, k, v = (t.to(DEVICE) for t in p.qkv)
    kernel = linearize(q, k, v, p.scores, "triton", precision)
    weights = torch.zeros(1, 2, 9, 9).double()
    weights[..., :3, :] = 0.0 if name == "sink" and offset < 0 else 1 / 9
    along = [gaussian(1, *t.shape, seed=i) for i, t in enumerate(p.qkv)]
    got = kernel.jvp(*(t.float().to(DEVICE) for t in along))[0, :, :, :3]
    ds = p.scores.scale * (along[0][0] @ p.k.double().mT + p.q.double() @ along[1][0].mT)[..., :3, :]
    t = weights[..., :3, :] * ds
    o = weights[..., :3, :] @ p.v.double()
    want = t @ p.v.double() - t.sum(-1, keepdim=True) * o + weights[..., :3, :] @ along[2][0]
    assert relative(kernel.output[..., :3, :], o, 1e-6) <= 1e-5
    assert relative(got, want, 1e-6) <= LIMITS[precision]
    g = torch.zeros(1, 2, 9, 8)
    g[..., :3, :] = gaussian(1, 2, 3, 8, seed=9)
    received = weights[..., :3, :].mT @ g[..., :3, :].double()
    assert relative(kernel.vjp(g[None].to(DEVICE))[2][0], received.sum(1, keepdim=True), 1e-6) <= LIMITS[precision]


@pytest.mark.parametrize("name", CORES)
def test_a_row_that_sees_nothing(name):
    hidden = torch.zeros(1, 1, 9, 9).double()
    hidden[..., 4, :] = -torch.inf
    check(kind_problem(name, batch=1, heads=2, kv_heads=1, n=9, d=16, d_v=8, mask=Mask(bias=hidden)), "half")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sink", "sigmoid", "l2"])
def test_noise_refined_and_selected(name):
    p = kind_problem(name, heads=2, kv_heads=1, n=20, d=16, d_v=8)
    kernel, truth = fused_and_true(p, "half")
    assert 1e-5 < kernel.noise < 5e-3
    finer = kernel.refined()
    assert finer is not None
    assert finer.noise < 5e-3
    strict = finer.refined()
    assert strict is not None
    assert strict.refined() is None
    d = [gaussian(1, *t.shape, seed=i) for i, t in enumerate(p.qkv)]
    assert relative(strict.jvp(*(t.float().to(DEVICE) for t in d)), truth.jvp(*d)) <= LIMITS["strict"]
    some = kernel.select(torch.tensor([1], device=DEVICE))
    assert relative(some.output, truth.output[1:]) <= 1e-5


def test_other_kinds_are_refused_by_name_and_go_elsewhere():
    q = gaussian(1, 2, 5, 16, seed=0, dtype=torch.float32).to(DEVICE)
    with pytest.raises(BadInputError, match="got Hard attention, which has none"):
        linearize(q, q, q, Scores(1.0, kind=Hard()), "triton")
    assert not isinstance(linearize(q, q, q, Scores(1.0, kind=Hard())), Fused)
    with pytest.raises(BadInputError, match="expected plain softmax beside an offset of keys, got sigmoids"):
        Fused(q, q, q, Scores(1.0, kind=Sigmoid()), offset=q[..., 0])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", NAMES)
def test_long_on_a_gpu(name, d, causal):
    check(kind_problem(name, batch=1, n=2000, d=d, d_v=d, mask=Mask(causal=causal)), "half", probes=2)
    check(kind_problem(name, batch=1, n=700, d=d, d_v=d, mask=Mask(causal=causal)), "strict")
