"""The tolerance policy, and the contract every operator keeps. `test_checkers.py` shows that each check can fail."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.spectral import Operator
from shapes import shapes_checked

PARITY = 1e-6  # against a library's own float64 model, which casts to float32 inside norms, softmax and rotary phases
ROUNDINGS = 16  # operations in a chain before a sum: softmax, two products, a division


def tolerance(dtype: torch.dtype, size: int, growth: float = 1.0) -> float:
    """Relative error in norm that rounding explains: `ROUNDINGS · eps · √size · growth`.

    size: numbers compared; independent roundings add up like their square root.
    growth: what the problem itself multiplies errors by, as `max |s|` does in `exp(s)`.
    """
    return ROUNDINGS * torch.finfo(dtype).eps * max(size, 1) ** 0.5 * growth


def assert_close(
    actual: Tensor, truth: Tensor, dtype: torch.dtype | None = None, *, scale: float = 0.0, growth: float = 1.0
) -> None:
    """`‖actual − truth‖ ≤ tolerance · max(‖truth‖, scale)`.

    dtype: the precision `actual` was computed in, its own if left out.  scale: the size of terms that cancel in `truth`.
    """
    assert actual.shape == truth.shape, f"shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    assert bool(truth.isfinite().all()), "the truth is not finite"
    assert bool(actual.isfinite().all()), f"{int((~actual.isfinite()).sum())} entries are not finite"
    error = float((actual.double() - truth.double()).norm())
    allowed = tolerance(dtype or actual.dtype, truth.numel(), growth) * max(float(truth.double().norm()), scale)
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}"


def probes(op: Operator, shape: tuple[int, ...], count: int = 3, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, op.batch, *shape, generator=random, dtype=torch.float64).to(op.dtype)


@shapes_checked()
def check_dense(op: Operator, reference: Tensor, *, growth: float = 1.0, scale: float = 0.0) -> None:
    """Both products give the reference matrices, (batch, out, in), whichever of them `dense` itself takes."""
    assert_close(op.dense(), reference, op.dtype, growth=growth, scale=scale)
    for product, shape, other, matrix in (
        (op.jvp, op.in_shape, op.out_shape, reference),
        (op.vjp, op.out_shape, op.in_shape, reference.mT),
    ):
        size = math.prod(shape)
        unit = torch.eye(size, dtype=op.dtype).reshape(size, 1, *shape).expand(-1, op.batch, *shape).contiguous()
        image = product(unit)
        assert image.shape == (size, op.batch, *other), f"a product of shape {tuple(image.shape)[2:]}, expected {other}"
        assert_close(image.reshape(size, op.batch, -1).permute(1, 2, 0), matrix, op.dtype, growth=growth, scale=scale)


@shapes_checked()
def check_adjoint(op: Operator, *, growth: float = 1.0, scale: float = 0.0) -> None:
    """`⟨Jv, u⟩ = ⟨v, Jᵀu⟩`, item by item. scale: the size of terms that cancel in the entries of `J`."""
    v, u = probes(op, op.in_shape, seed=1), probes(op, op.out_shape, seed=2)
    jv, jtu = op.jvp(v), op.vjp(u)
    assert jv.shape == u.shape, f"Jv has shape {tuple(jv.shape)}, expected {tuple(u.shape)}"
    assert jtu.shape == v.shape, f"Jᵀu has shape {tuple(jtu.shape)}, expected {tuple(v.shape)}"
    jv, u, v, jtu = (t.double().reshape(len(t), op.batch, -1) for t in (jv, u, v, jtu))
    for p in range(len(v)):
        for b in range(op.batch):
            left, right = (jv[p, b] * u[p, b]).sum(), (v[p, b] * jtu[p, b]).sum()
            size = float(jv[p, b].norm() * u[p, b].norm() + v[p, b].norm() * jtu[p, b].norm())
            size += scale * float(u[p, b].norm() * v[p, b].norm())
            assert_close(left, right, op.dtype, scale=size, growth=growth)


@shapes_checked()
def check_probes_equal_loop(op: Operator, *, growth: float = 1.0) -> None:
    """A block of probes gives what each gives alone, and no product writes into its argument."""
    for product, shape in ((op.jvp, op.in_shape), (op.vjp, op.out_shape)):
        block = probes(op, shape, seed=3)
        before = block.clone()
        together = product(block)
        assert torch.equal(block, before), "the product changed its argument"
        for p in range(len(block)):
            assert_close(together[p], product(block[p : p + 1])[0], op.dtype, growth=growth)


@shapes_checked()
def check_gram(op: Operator, *, growth: float = 1.0) -> None:
    """`gram(v)` is `Jᵀ(Jv)` and the inner products of the images `Jv`."""
    v = probes(op, op.in_shape, seed=4)
    image = op.jvp(v)
    product, energy = op.gram(v)
    flat = image.reshape(len(v), op.batch, -1).double()
    assert_close(product, op.vjp(image), op.dtype, growth=growth)
    assert_close(energy, torch.einsum("pbi,qbi->bpq", flat, flat), op.dtype, growth=growth)


@shapes_checked()
def check_select(op: Operator, *, growth: float = 1.0) -> None:
    """`select` keeps the maps of its items, in order, and can be repeated."""
    whole = op.dense()
    items = torch.arange(op.batch).flip(0)[: max(1, op.batch - 1)]
    some = op.select(items)
    assert some.batch == len(items), f"{some.batch} items, expected {len(items)}"
    assert_close(some.dense(), whole[items], op.dtype, growth=growth)
    again = torch.tensor([0])
    assert_close(some.select(again).dense(), whole[items][again], op.dtype, growth=growth)


@shapes_checked()
def check_batch_equals_loop(build: Callable[[Tensor], Operator], x: Tensor, *, growth: float = 1.0) -> None:
    """The operator of a batch is made of the operators of its items."""
    whole = build(x)
    assert whole.batch == len(x), f"{whole.batch} items, expected {len(x)}"
    whole = whole.dense()
    for b in range(len(x)):
        assert_close(whole[b : b + 1], build(x[b : b + 1]).dense(), growth=growth)


@shapes_checked()
def check_operator(op: Operator, reference: Tensor, *, growth: float = 1.0, scale: float = 0.0) -> None:
    """The whole contract of an operator whose matrices are known."""
    check_dense(op, reference, growth=growth, scale=scale)
    check_adjoint(op, growth=growth, scale=scale)
    check_probes_equal_loop(op, growth=growth)
    check_gram(op, growth=growth)
    check_select(op, growth=growth)


def jacobians(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Jacobians of a batched function by reverse-mode autodiff, (batch, out, in); it must not mix items."""
    with sdpa_kernel(SDPBackend.MATH):
        whole = torch.func.jacrev(f)(x)
    assert isinstance(whole, Tensor)
    batch = len(x)
    whole = whole.detach().reshape(batch, -1, batch, x[0].numel())
    index = torch.arange(batch)
    apart = whole[index, :, index]
    assert float(whole.norm()) <= float(apart.norm()) * (1 + 1e-12), "the function mixes the items of the batch"
    return apart


def violations(page: Any) -> list[tuple[str, list[Any]]]:
    """The rules of WCAG 2.1, levels A and AA, that axe finds broken on a page in a browser, each with where."""
    name, reason = "axe_playwright_python.sync_playwright", "axe is not installed; pip install axe-playwright-python runs this"
    axe = pytest.importorskip(name, reason=reason)
    found = axe.Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}).response["violations"]
    return [(rule["id"], [node["target"] for node in rule["nodes"][:3]]) for rule in found]
