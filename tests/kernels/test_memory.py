"""Which kernel serves, and what it holds."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import howsmooth as hs
from howsmooth.kernels import Blocked, Dense, Mask, dispatch, linearize
from problems.kinds import kind_problem
from problems.layers import gaussian, problem


@pytest.mark.parametrize(("softcap", "copies"), [(None, 1), (5.0, 2)])
def test_dispatch_keeps_weights_up_to_the_limit(monkeypatch, softcap, copies):
    p = problem(batch=2, heads=3, n=16, softcap=softcap)
    kept = 2 * 3 * 16 * 16 * 8 * copies
    monkeypatch.setitem(dispatch.KEPT_BYTES, "cpu", kept)
    assert type(linearize(*p.qkv, p.scores)) is Dense
    monkeypatch.setitem(dispatch.KEPT_BYTES, "cpu", kept - 1)
    assert type(linearize(*p.qkv, p.scores)) is Blocked


def test_dispatch_counts_what_a_mask_leaves(monkeypatch):
    p = problem(batch=1, heads=1, n=1024, mask=Mask(causal=True))
    monkeypatch.setitem(dispatch.KEPT_BYTES, "cpu", int(0.7 * 1024 * 1024 * 8))
    assert type(linearize(*p.qkv, p.scores)) is Dense
    full = problem(batch=1, heads=1, n=1024)
    assert type(linearize(*full.qkv, full.scores)) is Blocked


def peak_bytes(kind: type[Dense] | type[Blocked], n: int, heads: int = 1) -> int:
    """The most memory that construction and both products hold at once."""
    q, k, v = (gaussian(1, heads, n, 8, seed=i, dtype=torch.float32) for i in range(3))
    p = problem(batch=1, heads=1, n=2)

    def products() -> None:
        kernel = kind(q, k, v, p.scores)
        kernel.vjp(kernel.jvp(q[None], k[None], v[None]))

    return peak_of(products)


def peak_of(work: Callable[[], object]) -> int:
    """The most memory held at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        work()
    assert run.profiler is not None
    assert run.profiler.kineto_results is not None
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return max(accumulate(e.nbytes() for e in events))  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "heads"), [(4096, 1), (512, 64)], ids=["long", "many heads"])
def test_blocked_never_holds_the_weights(n, heads):
    weights = heads * n * n * 4
    assert peak_bytes(Blocked, n, heads) < weights / 3
    assert peak_bytes(Dense, n, heads) > weights  # the measurement sees them where they are


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sigmoid", "l2", "linear", "three iterations", "hard"])
def test_no_kind_holds_its_weights(name):
    n = 4096
    p = kind_problem(name, batch=1, heads=1, kv_heads=1, n=n, d=8, d_v=8).to(torch.float32)
    g = gaussian(1, 1, 1, n, 8, seed=4, dtype=torch.float32)

    def products() -> None:
        kernel = linearize(*p.qkv, p.scores, "blocked")
        kernel.jvp(*(t[None] for t in p.qkv))
        kernel.vjp(g)

    assert peak_of(products) < n * n * 4 / 3


@pytest.mark.slow
def test_second_derivatives_never_hold_the_weights():
    n = 4096
    x = tuple(gaussian(1, 1, n, 8, seed=i, dtype=torch.float32) for i in range(3))

    def product() -> object:
        return torch.func.jvp(lambda *a: torch.func.vjp(hs.sdpa, *a)[1](x[0]), x, x)

    assert peak_of(product) < n * n * 4 / 2
