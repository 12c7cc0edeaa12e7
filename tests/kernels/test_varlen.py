"""`hs.varlen` against `hs.sdpa` of one document after another, which `test_sdpa.py` compares with torch's."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacfwd, jvp, vjp, vmap

import howsmooth as hs
from howsmooth.errors import BadInputError
from problems.layers import gaussian

QUERIES, KEYS = [0, 3, 3, 8, 9], [0, 4, 6, 11, 11]  # one without queries, one without keys
WINDOWS: dict[tuple[int, int], dict[str, Any]] = {
    (-1, -1): {},
    (-1, 0): {"causal": True},
    (2, 0): {"causal": True, "window": 3},
    (1, 1): {"window": 2},
}


def packed(seed: int = 0, heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return gaussian(9, heads, 3, seed=seed), gaussian(11, 2, 3, seed=seed + 1), gaussian(11, 2, 2, seed=seed + 2)


def loop(q: Tensor, k: Tensor, v: Tensor, causal=False, window=10**6, softcap=None) -> Tensor:
    """Each document by itself; the last query stands at the last key."""
    found = []
    for (a, b), (c, d) in zip(pairwise(QUERIES), pairwise(KEYS), strict=True):
        apart = (d - c) - (b - a) + torch.arange(b - a)[:, None] - torch.arange(d - c)
        mask = (apart.abs() < window) & ((apart >= 0) | (not causal))
        parts = (t.transpose(0, 1) for t in (q[a:b], k[c:d], v[c:d]))
        found.append(hs.sdpa(*parts, attn_mask=mask, enable_gqa=True, softcap=softcap).transpose(0, 1))
    return torch.cat(found)


def ours(*x: Tensor, size=(-1, -1), **given: Any) -> Tensor:
    q, k, v = x
    cu = torch.tensor(QUERIES), torch.tensor(KEYS, dtype=torch.int32)
    return hs.varlen(q, k, v, *cu, 5, 5, window_size=size, enable_gqa=True, **given)


def curved(y: Tensor) -> Tensor:
    return (y.sin() * torch.arange(y.numel(), dtype=y.dtype).cos().reshape(y.shape)).sum()


def double_backward(f, x, t):
    a = tuple(p.clone().requires_grad_() for p in x)
    return torch.autograd.grad(torch.autograd.grad(curved(f(*a)), a, create_graph=True), a, t)


MODES = {
    "value and jvp": lambda f, x, t: jvp(f, x, t),
    "vjp": lambda f, x, t: vjp(lambda *a: curved(f(*a)), *x)[1](torch.ones((), dtype=x[0].dtype)),
    "forward over reverse": lambda f, x, t: jvp(grad(lambda *a: curved(f(*a)), (0, 1, 2)), x, t),
    "reverse over reverse": double_backward,
    "reverse over forward": lambda f, x, t: grad(lambda *a: curved(jvp(f, a, t)[1]), (0, 1, 2))(*x),
    "forward over forward": lambda f, x, t: jvp(lambda *a: jvp(f, a, t)[1], x, x),
    "vmap": lambda f, x, t: vmap(f, (1, 0, None))(torch.stack([x[0], t[0]], 1), torch.stack([x[1], t[1]]), x[2]),
    "batch of directions": lambda f, x, t: jacfwd(lambda v: f(x[0], x[1], v))(x[2]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", WINDOWS)
def test_every_derivative_is_that_of_documents_one_by_one(mode, size):
    x, t = packed(), packed(10)
    got = MODES[mode](lambda *a: ours(*a, size=size), x, t)
    want = MODES[mode](lambda *a: loop(*a, **WINDOWS[size]), x, t)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_softcap_and_lengths_that_are_read():
    q, k, v = packed()
    cu = torch.tensor(QUERIES), torch.tensor(KEYS)
    want = loop(q, k, v, softcap=0.5)
    torch.testing.assert_close(hs.varlen(q, k, v, *cu, enable_gqa=True, softcap=0.5), want, rtol=1e-12, atol=1e-12)


def test_documents_do_not_meet():
    x = gaussian(9, 2, 3, seed=0)
    moved = x.clone()
    moved[3:8] = torch.inf
    cu = torch.tensor(QUERIES)
    same = torch.tensor([0, 1, 2, 8])
    assert torch.equal(hs.varlen(x, x, x, cu)[same], hs.varlen(moved, moved, moved, cu)[same])


def test_no_tokens():
    x = gaussian(0, 2, 3, seed=0)
    assert hs.varlen(x, x, x, torch.tensor([0, 0])).shape == (0, 2, 3)


@pytest.mark.slow
def test_compiled_without_a_graph_break():
    x, t = packed(), packed(10)
    for mode in ("value and jvp", "forward over reverse"):
        run = torch.compile(lambda *a, mode=mode: MODES[mode](ours, a[:3], a[3:]), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(run(*x, *t), MODES[mode](ours, x, t), rtol=1e-12, atol=1e-12)


X, CU = torch.zeros(4, 2, 3), torch.tensor([0, 1, 4])
BAD: dict[str, tuple[tuple, dict[str, Any]]] = {
    "axes": ((X[None], X, X, CU), {}),
    "widths": ((X, X[..., :2], X, CU), {}),
    "heads": ((X, X[:, :1], X[:, :1].expand(4, 3, 3), CU), {}),
    "more heads of keys": ((X[:, :1], X, X, CU), {}),
    "no tensor": ((X, X, X, [0, 4]), {}),
    "of floats": ((X, X, X, CU.float()), {}),
    "from 1": ((X, X, X, CU + 1), {}),
    "too few tokens": ((X, X, X, CU[:2]), {}),
    "shrinks": ((X, X, X, torch.tensor([0, 3, 2, 4])), {}),
    "other keys": ((X, X, X, CU, torch.tensor([0, 4])), {}),
    "a longer document": ((X, X, X, CU, CU, 2, 3), {}),
    "a length of words": ((X, X, X, CU, CU, "long"), {}),
    "window": ((X, X, X, CU), {"window_size": (3, 1)}),
    "window by number": ((X, X, X, CU), {"window_size": 3}),
    "softcap": ((X, X, X, CU), {"softcap": 0.0}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(name):
    args, given = BAD[name]
    with pytest.raises(BadInputError, match=r"^expected .*, got .*; "):
        hs.varlen(*args, **given)


def test_a_batch_of_documents_is_refused():
    cu = torch.stack([CU, CU]).to("meta")
    x = X.to("meta")
    with pytest.raises(BadInputError, match="expected the same documents and seed of dropout"):
        vmap(lambda c: hs.varlen(x, x, x, c, c, 3, 3))(cu)


def test_tokens_without_a_document_are_nan():
    """Nobody reads what a GPU holds before it runs."""
    ops, q = torch.ops.howsmooth, gaussian(1, 1, 4, 2, seed=0)
    out, _ = ops.attend(q, q, q, None, 1.0, None, False, None, 0, torch.tensor([[1, 3, 1, 3]]), 3, 3, 0.0, None)
    assert bool(out[0, 0, 0].isnan().all())
    assert bool(out[0, 0, 1:].isfinite().all())


def test_wrong_documents_that_are_not_read_back_give_nan(monkeypatch):
    """As on a GPU, and under a compiler."""
    q, k, v = torch.randn(3, 6, 2, 4, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    right = torch.tensor([0, 2, 6])
    assert hs.varlen(q, k, v, right, None, 4, 4).isfinite().all()
    assert hs.varlen(q, k, v, right, None, 4, 3)[2:].isnan().all()  # a document longer than was said
    for wrong in ([0, 2, 4], [1, 2, 6], [0, 5, 3]):
        assert hs.varlen(q, k, v, right, torch.tensor(wrong), 6, 6).isnan().all()
        assert hs.varlen(q, k, v, torch.tensor(wrong), None, 6, 6).isnan().all()
