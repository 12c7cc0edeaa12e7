"""Every kind of attention: closed form, autodiff and the dense matrix agree in float64; extremes; what is refused."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import check_operator
from howsmooth.errors import HowSmoothError
from howsmooth.kernels import AttentionKernel, Dense, Mask, Scores, attend, dispatch, kinds, linearize, plain_attention
from howsmooth.kernels.base import TileSize
from howsmooth.kernels.dispatch import Mapped
from howsmooth.kernels.kinds import L2, Cosine, Differential, Hard, Linear, Sigmoid, Sinkhorn, Softmax
from howsmooth.kernels.summed import Summed
from problems.kinds import KIND_NAMES, dense_weights, kind_problem, kind_problems
from problems.layers import KernelJacobian, Problem, gaussian, key_mask

TOLERANCE = 1e-12


def apart(a: torch.Tensor, b: torch.Tensor, size: float = 0.0) -> float:
    """`‖a − b‖` beside the larger of `‖b‖` and a size; never small where either is not finite."""
    assert bool(a.isfinite().all())
    assert bool(b.isfinite().all())
    return float((a - b).norm() / max(float(b.norm()), size, 1e-300)) if bool((a != b).any()) else 0.0


def check_kernel(p: Problem, kernel: AttentionKernel, tolerance: float = TOLERANCE) -> None:
    """Value and both products against autodiff of the plain reference, for two probes."""
    assert apart(kernel.output, p.value(*p.qkv)) <= tolerance
    d = tuple(gaussian(2, *t.shape, seed=70 + i) for i, t in enumerate(p.qkv))
    forward = kernel.jvp(*d)
    g = gaussian(*forward.shape, seed=80)
    backward, pull = kernel.vjp(g), torch.func.vjp(p.value, *p.qkv)[1]
    for i in range(2):
        truth = torch.func.jvp(p.value, p.qkv, tuple(t[i] for t in d))[1]
        want = pull(g[i])
        size = float(torch.stack([t.norm() for t in want]).max())  # some of them may have no derivative but rounding
        assert apart(forward[i], truth, 1e-2 * size) <= tolerance
        assert all(apart(got[i], t, size) <= tolerance for got, t in zip(backward, want, strict=True))


@pytest.mark.parametrize("name", KIND_NAMES)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_closed_form_is_autodiff(name, data):
    p = data.draw(kind_problems(name))
    for kernel in ("dense", "blocked"):
        check_kernel(p, by_name(p, kernel))


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("name", KIND_NAMES)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_closed_form_is_autodiff_many_times(name, data):
    p = data.draw(kind_problems(name))
    for kernel in ("dense", "blocked"):
        check_kernel(p, by_name(p, kernel))


@pytest.mark.parametrize("name", KIND_NAMES)
def test_products_are_the_dense_matrix(name):
    p = kind_problem(name, batch=2, heads=2, kv_heads=1, n=4, d=2, d_v=2, mask=Mask(keys=torch.ones(2, 4).bool()))
    blocks = torch.func.jacrev(p.value, argnums=(0, 1, 2))(*p.qkv)
    index = torch.arange(2)
    truth = torch.cat([b.reshape(2, -1, 2, b.shape[5:].numel())[index, :, index] for b in blocks], -1)
    for kernel in ("dense", "blocked"):
        op = KernelJacobian(linearize(*p.qkv, p.scores, kernel), p.qkv)
        assert apart(op.dense(), truth) <= TOLERANCE
        check_operator(op, truth, growth=100.0, scale=float(truth.norm()))


@pytest.mark.parametrize("name", [n for n in KIND_NAMES if "differential" not in n])
@pytest.mark.parametrize("mask", ["full", "causal", "window", "keys"])
def test_weights_are_their_formula(name, mask):
    keys = key_mask(2, 7)
    keys[:, 0] = True
    given = {"full": Mask(), "causal": Mask(causal=True), "window": Mask(window=3), "keys": Mask(keys=keys)}[mask]
    if mask == "causal" and isinstance(kinds_of(name), Sinkhorn):
        return
    p = kind_problem(name, mask=given)
    truth = dense_weights(p)
    if isinstance(p.scores.kind, Sinkhorn) and mask == "keys":
        truth = _without_queries(p, keys)
    v = p.v if not (isinstance(p.scores.kind, Cosine) and p.scores.kind.values) else _unit(p.v, p.scores.kind.epsilon)
    factor = p.scores.kind.factor if isinstance(p.scores.kind, Cosine) else 1.0
    o = factor * truth @ v.repeat_interleave(2, 1)
    rows = keys[:, None, :, None] if isinstance(p.scores.kind, Sinkhorn) and mask == "keys" else torch.ones(())
    assert apart(p.value(*p.qkv) * rows, o * rows) <= 1e-10


def by_name(p: Problem, kernel: dispatch.Kernel) -> AttentionKernel:
    return linearize(p.q, p.k, p.v, p.scores, kernel)


def kinds_of(name: str) -> kinds.Kind:
    return kind_problem(name).scores.kind


def _unit(t: torch.Tensor, epsilon: float) -> torch.Tensor:
    return t / (t.square().sum(-1, keepdim=True) + epsilon).sqrt()


def _without_queries(p: Problem, keys: torch.Tensor) -> torch.Tensor:
    """Sinkhorn weights of the real tokens alone, put back in their places."""
    out = torch.zeros(*p.q.shape[:3], p.k.shape[2], dtype=p.q.dtype)
    for b in range(len(keys)):
        real = torch.nonzero(keys[b])[:, 0]
        part = Problem(p.q[b : b + 1, :, real], p.k[b : b + 1, :, real], p.v, Scores(p.scores.scale, kind=p.scores.kind))
        whole = out[b]
        whole[:, real[:, None], real] = dense_weights(part)[0]
    return out


def test_differential_is_two_softmaxes():
    p = kind_problem("differential", heads=2, kv_heads=1, n=5, d=4)
    q, k = p.q.unflatten(1, (2, 2)), p.k.unflatten(1, (1, 2)).repeat_interleave(2, 1)
    first, second = (torch.softmax(p.scores.scale * q[:, :, i] @ k[:, :, i].mT, -1) for i in (0, 1))
    truth = (first - 0.6 * second) @ p.v.repeat_interleave(2, 1)
    assert apart(p.value(*p.qkv), truth) <= TOLERANCE
    normed = kind_problem("normed differential", heads=2, kv_heads=1, n=5, d=4)
    rms = (truth.square().mean(-1, keepdim=True) + 1e-2).sqrt()
    assert apart(normed.value(*normed.qkv), 0.4 * truth / rms) <= TOLERANCE


@pytest.mark.slow
def test_tiles_of_any_size_and_running_sums_agree():
    for name in KIND_NAMES:
        p = kind_problem(name, n=13)
        whole = linearize(*p.qkv, p.scores, "blocked")
        d = tuple(gaussian(1, *t.shape, seed=90 + i) for i, t in enumerate(p.qkv))
        core = whole.core if isinstance(whole, Mapped) else whole
        if isinstance(core, Summed):
            other = linearize(*p.qkv, p.scores, "dense")  # on tiles
            assert apart(whole.jvp(*d), other.jvp(*d)) <= TOLERANCE
            continue
        inputs, offset = core.inputs, getattr(core, "_given", None)
        make: Any = type(core)
        small = make(*inputs, core.scores, TileSize(rows=4, cols=2, leaf=1, elements=9), offset=offset)
        assert apart(small.output, core.output) <= TOLERANCE
        g = gaussian(1, *core.output.shape, seed=95)
        for a, b in zip(small.vjp(g), core.vjp(g), strict=True):
            assert apart(a, b, float(core.vjp(g)[2].norm())) <= TOLERANCE


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 127, 128, 129, 300])
def test_running_sums_over_chunks(causal, n):
    for name in ("linear", "linear of relu", "linear without sums"):
        p = kind_problem(name, batch=1, heads=2, kv_heads=1, n=n, mask=Mask(causal=causal))
        assert isinstance(linearize(*p.qkv, p.scores, "blocked").core, Summed)  # pyright: ignore[reportAttributeAccessIssue]
        check_kernel(p, linearize(*p.qkv, p.scores, "blocked"))


@pytest.mark.parametrize("name", KIND_NAMES)
def test_extremes(name):
    stochastic = name == "doubly stochastic"
    for logit in (0.0, 1e-6, 1.0) if stochastic else (0.0, 1.0, 1e4):
        p = kind_problem(name, n=5, logit=logit)
        tolerance = TOLERANCE * max(1.0, logit)  # one rounding of a logit moves a weight by so much
        for kernel in ("dense", "blocked"):
            check_kernel(p, linearize(*p.qkv, p.scores, kernel), tolerance)
    one = kind_problem(name, n=1)
    check_kernel(one, linearize(*one.qkv, one.scores))
    nothing = kind_problem(name, mask=Mask(keys=torch.zeros(2, 7, dtype=torch.bool)))
    seen = linearize(*nothing.qkv, nothing.scores)
    assert float(seen.output.abs().max()) == 0
    d = tuple(gaussian(1, *t.shape, seed=i) for i, t in enumerate(nothing.qkv))
    assert float(seen.jvp(*d).abs().max()) == 0
    p = kind_problem(name, n=6)
    q, k, v = (t[:, :, :1].expand(-1, -1, 6, -1).contiguous() for t in p.qkv)
    same = Problem(q, k, v, p.scores)
    check_kernel(same, linearize(*same.qkv, same.scores))


def test_hard_shares_ties():
    x = torch.zeros(1, 1, 4, 2, dtype=torch.float64)
    v = gaussian(1, 1, 4, 2, seed=1)
    assert apart(plain_attention(x, x, v, Scores(1.0, kind=Hard())), v.mean(2, keepdim=True).expand_as(v)) <= TOLERANCE
    k = torch.tensor([[1.0, 0], [1, 0], [0.5, 0], [0, 0]]).double()[None, None]
    q = torch.tensor([[1.0, 0]]).double()[None, None]
    for kernel in ("dense", "blocked"):
        out = linearize(q, k, v, Scores(1.0, kind=Hard()), kernel).output
        assert apart(out[0, 0, 0], v[0, 0, :2].mean(0)) <= TOLERANCE
        assert apart(linearize(q, k, v, Scores(1.0, kind=Hard(3)), kernel).output[0, 0, 0], v[0, 0, :3].mean(0)) <= TOLERANCE


def test_doubly_stochastic_limit():
    p = kind_problem("doubly stochastic", mask=Mask(window=4))
    eye = torch.eye(7, dtype=torch.float64).expand(2, 2, 7, 7)
    weights = linearize(p.q, p.k, eye, p.scores).output
    for axis in (-1, -2):
        assert float((weights.sum(axis) - 1).abs().max()) <= 1e-12
    far = kind_problem("doubly stochastic", logit=1e6)
    with pytest.raises(HowSmoothError, match=r"use Sinkhorn\(iterations=k\)"):
        linearize(*far.qkv, far.scores)


def test_one_iteration_is_softmax_and_a_low_sink_nothing():
    p = kind_problem("one iteration")
    soft = Scores(p.scores.scale)
    truth = linearize(*p.qkv, soft)
    for kind in (Sinkhorn(1), Softmax(torch.full((4,), -1e30, dtype=torch.float64))):
        other = linearize(*p.qkv, Scores(p.scores.scale, kind=kind))
        d = tuple(gaussian(1, *t.shape, seed=i) for i, t in enumerate(p.qkv))
        assert apart(other.output, truth.output) <= TOLERANCE
        assert apart(other.jvp(*d), truth.jvp(*d)) <= TOLERANCE


@pytest.mark.parametrize("name", KIND_NAMES)
def test_kernels_answer_the_rest(name):
    """What a layer asks of a kernel beside products."""
    p = kind_problem(name, mask=Mask(keys=key_mask(2, 7)) if "iter" not in name else None)
    kernel = linearize(*p.qkv, p.scores)
    assert 0 < kernel.noise < 1e-10
    eye = torch.eye(7, dtype=torch.float64).expand(2, 2, 7, 7)
    if not (isinstance(p.scores.kind, Cosine | Differential)):
        weights = plain_attention(p.q, p.k, eye, p.scores)
        assert apart(kernel.attention_received(), weights.sum(-2).mean(1)) <= TOLERANCE
    items = torch.tensor([1])
    assert apart(kernel.select(items).output, kernel.output[items]) <= TOLERANCE
    assert kernel.refined() is None
    if not isinstance(p.scores.kind, Linear):
        low, high = kernel.logit_range()
        assert low <= high
    if isinstance(p.scores.kind, L2):
        s = -p.scores.scale * (p.q[:, :, :, None] - p.k.repeat_interleave(2, 1)[:, :, None]).square().sum(-1)
        assert p.scores.mask.keys is not None
        s = s[p.scores.mask.keys[:, None, None].expand_as(s)]
        assert kernel.logit_range() == pytest.approx((float(s.min()), float(s.max())))
    assert apart(attend(*p.qkv, p.scores), kernel.output) <= TOLERANCE


def test_differential_received():
    p = kind_problem("differential", heads=2, kv_heads=1, n=5)
    eye = torch.eye(5, dtype=torch.float64).expand(2, 1, 5, 5)
    weights = plain_attention(p.q, p.k, eye, p.scores)
    assert apart(linearize(*p.qkv, p.scores).attention_received(), weights.sum(-2).mean(1)) <= TOLERANCE


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Sinkhorn(0), r"expected 1 or more whole iterations of Sinkhorn, or None, got 0; 1 is softmax"),
        (
            lambda: Sinkhorn(2.5),  # pyright: ignore[reportArgumentType]
            "whole iterations",
        ),
        (lambda: Softmax(torch.zeros(2, 2)), r"expected sink as a floating-point tensor \(heads\)"),
        (lambda: Softmax(torch.tensor([1.0, float("nan")])), "expected finite sink"),
        (lambda: Sigmoid(float("inf")), "expected a finite bias of Sigmoid"),
        (lambda: Cosine(epsilon=0.0), "positive epsilon of Cosine"),
        (
            lambda: Cosine(values="yes"),  # pyright: ignore[reportArgumentType]
            "values as True or False",
        ),
        (
            lambda: Linear("gelu"),  # pyright: ignore[reportArgumentType]
            "features of Linear among elu, relu",
        ),
        (lambda: Differential(float("nan")), "finite lam"),
        (lambda: Hard(0), "whole number of keys for Hard"),
        (
            lambda: L2(tied=1),  # pyright: ignore[reportArgumentType]
            "tied as True or False",
        ),
        (lambda: Scores(1.0, mask=Mask(causal=True), kind=Sinkhorn()), "Sinkhorn attention without a causal mask, got one"),
        (lambda: Scores(1.0, softcap=1.0, kind=Linear()), "Linear attention without a soft-cap"),
        (lambda: Scores(1.0, softcap=1.0, kind=L2()), "L2 attention without a soft-cap"),
        (lambda: Scores(1.0, mask=Mask(bias=torch.zeros(1, 1, 2, 2)), kind=Linear()), "without a bias on its logits"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(make, said):
    with pytest.raises(HowSmoothError, match=said) as refusal:
        make()
    assert "\n" not in str(refusal.value)


def test_bad_tensors_are_refused():
    q = gaussian(1, 4, 5, 2, seed=0)
    for kernel in ("dense", "blocked"):
        with pytest.raises(HowSmoothError, match="expected a sink of 4 numbers, one per head, got 3"):
            linearize(q, q, q, Scores(1.0, kind=Softmax(torch.zeros(3))), kernel)
        with pytest.raises(HowSmoothError, match="as many queries as keys for Sinkhorn"):
            linearize(q[:, :, :3], q, q, Scores(1.0, kind=Sinkhorn()), kernel)
    with pytest.raises(HowSmoothError, match="expected no scale for Linear"):
        linearize(q, q, q, Scores(0.5, kind=Linear()))
    with pytest.raises(HowSmoothError, match=r"use kernels\.linearize"):
        Dense(q, q, q, Scores(1.0, kind=Cosine()))
