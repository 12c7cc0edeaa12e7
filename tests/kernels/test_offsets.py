"""`hs.sdpa` where logits of a whole row share a large offset, as masks filled with −1e9 or the least number make them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

import howsmooth as hs
from howsmooth.kernels import Mask, Scores, attention_and_kernel, operators, tiled
from marks import first
from problems.layers import gaussian

TORCHS: Any = torch.nn.functional.scaled_dot_product_attention
OFFSETS = [-1e4, 1e6, -1e9, 1e9, -1e30, torch.finfo(torch.float32).min]
Given = tuple[Tensor, Tensor, Tensor]


def math_backend(q, k, v, mask):
    with sdpa_kernel(SDPBackend.MATH):
        return TORCHS(q, k, v, mask)


def written_out(q, k, v, mask):
    """The formula, with the largest logit of each row taken off it."""
    s = q @ k.mT / q.shape[-1] ** 0.5 + mask
    p = torch.exp(s - s.amax(-1, keepdim=True).detach())
    return p / p.sum(-1, keepdim=True) @ v


def products(f, x: Given, mask: Tensor) -> list[tuple[Tensor, ...]]:
    """Output, jvp, vjp; the Hessian of a number made of the outputs, in three ways; the second derivative along directions."""
    t, e = (tuple(gaussian(*a.shape, seed=i + k).to(a) for i, a in enumerate(x)) for k in (10, 20))
    w = gaussian(*x[0].shape[:-1], x[2].shape[-1], seed=30).to(x[0])

    def g(*a):
        return f(*a, mask)

    def number(*a):
        return (w * torch.sin(g(*a))).sum()

    def gradient(*a):
        return grad(number, (0, 1, 2))(*a)

    def along(*a):
        return jvp(g, a, t)[1]

    first = [(g(*x),), (along(*x),), gradient(*x)]
    second = [jvp(gradient, x, t)[1], vjp(gradient, *x)[1](t), grad(lambda *a: (w * along(*a)).sum(), (0, 1, 2))(*x)]
    return [*first, *second, (jvp(along, x, e)[1],)]


def rows_of(mask: Tensor, offset: float) -> Tensor:
    """Rows that are filled wholly, in their first half, but for one key, beside hidden keys; and others."""
    n = mask.shape[-1]
    mask[..., 0, :] = offset
    mask[..., 1, : n // 2] = offset
    mask[..., 2, 1:] = offset
    mask[..., 3, :] = offset
    mask[..., 3, ::2] = -torch.inf
    mask[..., -1, :] += offset  # with differences that may drown
    return mask


def problem(n: int, dtype: torch.dtype, offset: float) -> tuple[Given, Tensor]:
    q, k, v = (gaussian(1, 2, n, w, seed=i).to(dtype) for i, w in enumerate((8, 8, 5)))
    return (q, k, v), rows_of(gaussian(n, n, seed=4).to(dtype), offset)


def allowed(dtype: torch.dtype, offset: float) -> float:
    """Roundings of sums, and of logits of a few units beside the offset; beside larger ones they leave nothing to round."""
    unit = torch.finfo(dtype).eps * abs(offset)
    return 200 * torch.finfo(dtype).eps + (8 * unit if unit < 1 else 0.0)


def check(got: list[tuple[Tensor, ...]], want: list[tuple[Tensor, ...]], limit: float) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        size = max(float(t.norm()) for t in b)
        for x, y in zip(a, b, strict=True):
            assert bool(x.isfinite().all())
            assert float((x - y).norm()) <= limit * size, f"product {i}: off by {float((x - y).norm()) / size:.1e}"


@pytest.mark.parametrize(("n", "tile"), [(6, None), (6, 4), (64, None), (64, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", OFFSETS)
def test_every_product_is_that_of_torchs_math(offset, dtype, n, tile, monkeypatch):
    if tile is not None:
        monkeypatch.setattr(tiled.TileSize, "on", lambda device: tiled.TileSize(tile, tile, leaf=2, elements=tile**2))
    if dtype == torch.float64 and offset == OFFSETS[-1]:
        offset = torch.finfo(dtype).min
    x, mask = problem(n, dtype, offset)
    got = products(hs.sdpa, x, mask)
    check(got, products(math_backend, x, mask), allowed(dtype, offset))
    check(got, products(written_out, x, mask), allowed(dtype, offset))


@pytest.mark.parametrize("offset", [-1e9, torch.finfo(torch.float32).min])
def test_a_row_that_is_wholly_filled_weighs_all_keys_alike(offset):
    """In float32 nothing is left of its logits: its output is the mean of the values, and its derivatives those of a mean."""
    (q, k, v), mask = problem(6, torch.float32, offset)
    t = gaussian(*q.shape, seed=7).float()
    found = jvp(lambda q: hs.sdpa(q, k, v, attn_mask=mask)[..., 0, :], (q,), (t,))
    assert torch.allclose(found[0], v.mean(-2), atol=1e-6)
    ds = (t[..., :1, :] @ k.mT) / q.shape[-1] ** 0.5
    want = ((ds - ds.mean(-1, keepdim=True)) @ v / 6)[..., 0, :]
    assert torch.allclose(found[1], want, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_that_are_all_alike_and_far_away(dtype):
    """Logits of 1e7 without any mask: weights are equal, and sum to one in every derivative."""
    q, k = (torch.full((1, 1, 6, 4), size, dtype=dtype) for size in (1e4, 512.0))
    v = gaussian(1, 1, 6, 3, seed=3).to(dtype)
    tangent = gaussian(*k.shape, seed=4).to(dtype)
    got = jvp(lambda k: hs.sdpa(q, k, v, scale=1.0), (k,), (tangent,))[1]
    ds = q @ tangent.mT
    want = (ds - ds.mean(-1, keepdim=True)) @ v / 6
    assert float((got - want).norm() / want.norm()) <= 200 * torch.finfo(dtype).eps


def test_a_window_beside_an_offset():
    """The largest entry of a row of the mask is on a key that the window hides."""
    (q, k, v), mask = problem(12, torch.float32, -1e9)
    mask[5] = -1e9
    mask[5, 0] = 0.0
    near = (torch.arange(12)[:, None] - torch.arange(12)).abs() < 3
    got = products(lambda q, k, v, m: hs.sdpa(q, k, v, m, window=3), (q, k, v), mask)
    check(got, products(math_backend, (q, k, v), mask.masked_fill(~near, -torch.inf)), 1e-4)


def test_rows_that_see_nothing_stay_zero():
    (q, k, v), mask = problem(6, torch.float32, -1e9)
    mask[4] = -torch.inf
    got = products(hs.sdpa, (q, k, v), mask)
    assert all(bool(t.isfinite().all()) for found in got for t in found)
    for found in (got[0], got[1], got[-1]):
        assert bool((found[0][..., 4, :] == 0).all())
    for found in got[2:-1]:
        assert bool((found[0][..., 4, :] == 0).all())


@pytest.mark.parametrize("offset", [-1e9, torch.finfo(torch.float32).min])
def test_a_node_of_a_measured_map(offset):
    (q, k, v), mask = problem(6, torch.float32, offset)
    scores = Scores(8**-0.5, mask=Mask(bias=mask[None, None]))
    t = gaussian(*k.shape, seed=7).float()
    got = jvp(lambda k: attention_and_kernel(q, k, v, scores)[0], (k,), (t,))
    want = jvp(lambda k: math_backend(q, k, v, mask), (k,), (t,))
    check([(a,) for a in got], [(a,) for a in want], 1e-5)
    k = k.requires_grad_()
    g = torch.autograd.grad(attention_and_kernel(q, k, v, scores)[0].sum(-1).cos().sum(), k)
    check([g], [torch.autograd.grad(math_backend(q, k, v, mask).sum(-1).cos().sum(), k)], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("offset", first([-1e9, 1e9, torch.finfo(torch.float32).min]))
def test_sdpas_kernels_for_a_gpu(offset, monkeypatch):
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, mask = problem(6, torch.float32, offset)
    want = products(math_backend, x, mask)
    monkeypatch.setattr(operators, "_fused", lambda q, v: q.dtype != torch.float64)
    got = products(hs.sdpa, tuple(t.to(device) for t in x), mask.to(device))  # pyright: ignore[reportArgumentType]
    check([tuple(t.cpu() for t in found) for found in got], want, 1e-4)
