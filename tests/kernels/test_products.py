"""Both kernels against the plain reference and torch's autodiff, float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import assert_close, check_operator
from howsmooth.kernels import AttentionKernel, Blocked, Dense, Mask, Scores, TileSize
from problems.layers import MASK_NAMES, KernelJacobian, Problem, gaussian, key_mask, masks, problem, problems

KERNELS = [Dense, Blocked]
TINY = TileSize(rows=2, cols=3, leaf=1, elements=1)
SMALL = TileSize(rows=16, cols=8, leaf=4, elements=300)


def directions(p: Problem, probes: int = 3) -> tuple[torch.Tensor, ...]:
    return tuple(gaussian(probes, *t.shape, seed=70 + i) for i, t in enumerate(p.qkv))


def largest_logit(p: Problem) -> float:
    group = p.q.shape[1] // p.k.shape[1]
    return float((p.scores.scale * p.q @ p.k.repeat_interleave(group, 1).mT).abs().max())


def check_kernel(
    p: Problem, kernel: AttentionKernel, dtype: torch.dtype = torch.float64, growth: tuple[float, float] | None = None
) -> None:
    """Value and both products, for several probes, against autodiff of the reference.

    growth: of errors in the value and in the products; the size of the logits if left out.
    """
    of_value, of_products = growth or 2 * (1 + largest_logit(p),)
    assert_close(kernel.output, p.value(*p.qkv), dtype, growth=of_value)
    d = directions(p)
    forward = kernel.jvp(*(t.to(dtype) for t in d))
    g = gaussian(*forward.shape, seed=80)
    backward = kernel.vjp(g.to(dtype))
    pull = torch.func.vjp(p.value, *p.qkv)[1]
    for i in range(len(g)):
        assert_close(forward[i], torch.func.jvp(p.value, p.qkv, tuple(t[i] for t in d))[1], dtype, growth=of_products)
        want = pull(g[i])
        size = float(want[2].norm())  # queries and keys may have a derivative of zero: rounding is that of the values
        for got, truth in zip(backward, want, strict=True):
            assert_close(got[i], truth, dtype, growth=of_products, scale=size)


def truth(p: Problem) -> torch.Tensor:
    """Jacobian matrices by autodiff, (batch, out, in)."""
    blocks = torch.func.jacrev(p.value, argnums=(0, 1, 2))(*p.qkv)
    index = torch.arange(len(p.q))
    return torch.cat([b.reshape(len(index), -1, len(index), b.shape[5:].numel())[index, :, index] for b in blocks], -1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("size", [TINY, SMALL, None], ids=["tiny tiles", "small tiles", "default tiles"])
@pytest.mark.parametrize("name", MASK_NAMES)
def test_every_mask(kind, size, name):
    p = problem(batch=3, heads=4, kv_heads=2, n=7, mask=masks(3, 4, 7)[name])
    check_kernel(p, p.kernel(kind, size))


@pytest.mark.slow
@settings(max_examples=100)
@given(problems(), st.sampled_from([TINY, SMALL, None]), st.sampled_from(KERNELS))
def test_contract(p, size, kind):
    scale = float(p.v.norm() * (p.q.norm() + p.k.norm()))
    op = KernelJacobian(p.kernel(kind, size), p.qkv)
    assert_close(op.kernel.output, p.value(*p.qkv), growth=1 + largest_logit(p))
    check_operator(op, truth(p), growth=(1 + largest_logit(p)) * (1 + scale))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("name", ["full", "causal", "window", "everything"])
@pytest.mark.parametrize(("n", "d", "d_v"), [(1, 1, 1), (1, 5, 3), (63, 1, 1), (63, 7, 5), (111, 5, 1)])
def test_odd_shapes(kind, name, n, d, d_v):
    p = problem(batch=2, heads=3, n=n, d=d, d_v=d_v, mask=masks(2, 3, n)[name])
    check_kernel(p, p.kernel(kind, SMALL))


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize(("n", "m"), [(1, 9), (9, 1), (5, 23), (23, 5)])
def test_as_many_keys_as_you_like(kind, n, m):
    p = problem(n=n, m=m, mask=Mask(keys=key_mask(2, m)))
    check_kernel(p, p.kernel(kind, SMALL))


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("softcap", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("name", ["full", "everything"])
def test_softcap(kind, softcap, name):
    p = problem(n=9, softcap=softcap, logit=10.0, mask=masks(2, 2, 9)[name])
    check_kernel(p, p.kernel(kind, SMALL))


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("name", ["full", "causal", "everything"])
@pytest.mark.parametrize("logit", [1e4, 1e6])
def test_large_logits(kind, name, logit):
    p = problem(n=17, logit=logit, mask=masks(2, 2, 17)[name])
    check_kernel(p, p.kernel(kind, SMALL))


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("name", ["full", "causal", "causal window", "keys"])
@pytest.mark.parametrize("base", [100, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_large_logits_that_differ_little(kind, name, base, dtype):
    """Logits `base² + {−9 … 9}`, integers, so exact in single precision: rows must come out as if `base` were not there."""
    p = problem(n=17, d=4, mask=masks(2, 2, 17)[name])
    q, k = p.q.round().clamp(-1, 1), p.k.round().clamp(-3, 3)
    q[..., 0] = k[..., 0] = base
    p = Problem(q, k, p.v.to(dtype).double(), Scores(1.0, None, p.scores.mask))
    check_kernel(p, p.to(dtype).kernel(kind, SMALL), dtype, growth=(1.0, base))
    small = Problem(q[..., 1:], k[..., 1:], p.v, p.scores)
    assert_close(p.to(dtype).kernel(kind, SMALL).output, small.value(*small.qkv), dtype)


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("logit", [1e4, 1e6])
def test_large_equal_logits_share_the_row(kind, logit):
    p = problem(batch=1, heads=1, n=8, d=2)
    p = Problem(torch.full_like(p.q, logit**0.5), torch.full_like(p.k, logit**0.5), p.v, p.scores).to(torch.float32)
    assert_close(p.kernel(kind, TINY).output, p.v.mean(2, keepdim=True).expand_as(p.v))


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("size", [TINY, None])
def test_single_precision(kind, size):
    p = problem(batch=3, heads=4, kv_heads=2, n=33, mask=masks(3, 4, 33)["causal holes"]).to(torch.float32)
    check_kernel(p.to(torch.float64), p.kernel(kind, size), torch.float32)


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("size", [TINY, None])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_query_that_sees_nothing_gives_zero(kind, size, softcap):
    hidden = [0, 6]
    p = problem(n=7, mask=masks(2, 2, 7)["lost rows"], softcap=softcap)
    kernel = p.kernel(kind, size)
    forward = kernel.jvp(*directions(p))
    assert not bool(kernel.output[:, :, hidden].any())
    assert not bool(forward[:, :, :, hidden].any())
    assert bool(forward.isfinite().all())
    g = torch.zeros_like(forward)
    g[:, :, :, hidden] = 1.0
    assert not any(bool(t.any()) for t in kernel.vjp(g))


@pytest.mark.slow
@pytest.mark.parametrize("name", MASK_NAMES)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_kernels_agree_to_rounding(name, softcap):
    p = problem(batch=2, heads=3, n=40, mask=masks(2, 3, 40)[name], softcap=softcap)
    dense, blocked = p.kernel(Dense, SMALL), p.kernel(Blocked, SMALL)
    assert_close(blocked.output, dense.output)
    d = directions(p)
    assert_close(blocked.jvp(*d), dense.jvp(*d))
    g = gaussian(3, *dense.output.shape, seed=80)
    for ours, theirs in zip(blocked.vjp(g), dense.vjp(g), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("size", [TINY, None])
@pytest.mark.parametrize("name", MASK_NAMES)
def test_attention_received_is_the_column_sum(kind, size, name):
    p = problem(heads=4, kv_heads=2, mask=masks(2, 4, 7)[name])
    assert_close(p.kernel(kind, size).attention_received(), p.weights().sum(2).mean(1))


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("name", ["causal keys", "bias 000", "bias 111", "everything"])
def test_select(kind, name):
    p = problem(batch=4, mask=masks(4, 2, 7)[name])
    items = torch.tensor([3, 1])
    kernel = p.kernel(kind, TINY)
    some = kernel.select(items)
    assert type(some) is kind
    d = directions(p)
    assert_close(some.output, kernel.output[items])
    assert_close(some.jvp(*(t[:, items] for t in d)), kernel.jvp(*d)[:, items])


@pytest.mark.parametrize("kind", KERNELS)
def test_inputs_are_left_alone(kind):
    p = problem(mask=masks(2, 2, 7)["everything"], softcap=2.0)
    d = directions(p)
    g = gaussian(3, *p.value(*p.qkv).shape, seed=80)
    given_tensors = [*p.qkv, *d, g, p.scores.mask.bias, p.scores.mask.keys]
    before = [t.clone() for t in given_tensors if t is not None]
    kernel = p.kernel(kind, TINY)
    kernel.jvp(*d)
    kernel.vjp(g)
    kernel.attention_received()
    after = [t for t in given_tensors if t is not None]
    assert len(after) == 9
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("name", ["full", "everything"])
def test_no_result_depends_on_uninitialised_memory(kind, name):
    p = problem(n=20, mask=masks(2, 2, 20)[name], softcap=2.0)

    def results() -> list[torch.Tensor]:
        kernel = p.kernel(kind, SMALL)
        forward = kernel.jvp(*directions(p))
        return [kernel.output, forward, *kernel.vjp(forward), kernel.attention_received()]

    first = results()
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    try:
        assert bool(torch.empty(3).isnan().all())
        poisoned = results()
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(first, poisoned, strict=True):
        assert torch.equal(a, b)
