"""Digits that are kept: in sigmoid and tanh where they are flat, and in torch's own float32 matrix products on a GPU.

`σ(s)(1 − σ(s))` and `1 − tanh²(t)` cancel where the functions are flat: past `s = 37` they are zero in float64, whatever comes
after them. The same numbers as products, `σ(s) σ(−s)` and `1/cosh²(t)`, are exact to a few units in the last place until they
underflow.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def sigmoid(s: Tensor) -> Tensor:
    """`σ(s)` in operations of torch whose derivatives, taken automatically in any mode, do not cancel.

    >>> s = torch.tensor(50.0, dtype=torch.float64, requires_grad=True)
    >>> [f"{float(torch.autograd.grad(f(s), s)[0]):.3e}" for f in (sigmoid, torch.sigmoid)]
    ['1.929e-22', '0.000e+00']
    """
    low = s < 0
    e = torch.exp(torch.where(low, s, -s))
    return torch.where(low, e, 1.0) / (1 + e)


def sigmoid_slope(s: Tensor) -> Tensor:
    """`σ'(s) = σ(s) σ(−s)`."""
    return torch.sigmoid(s) * torch.sigmoid(-s)


def tanh(t: Tensor) -> Tensor:
    """`tanh t` in operations of torch whose derivatives, taken automatically in any mode, do not cancel.

    >>> t = torch.tensor(25.0, dtype=torch.float64, requires_grad=True)
    >>> [f"{float(torch.autograd.grad(f(t), t)[0]):.3e}" for f in (tanh, torch.tanh)]
    ['7.715e-22', '0.000e+00']
    """
    low = t < 0
    e = torch.exp(torch.where(low, 2 * t, -2 * t))
    far = torch.where(low, e - 1, 1 - e) / (1 + e)
    return torch.where(t.abs() < 1, torch.tanh(t), far)  # near zero it is 1 − e that cancels


def tanh_slope(t: Tensor) -> Tensor:
    """`1 − tanh²(t) = 1/cosh²(t)`."""
    return torch.cosh(t).square().reciprocal()


@contextmanager
def float32_products(*, coarse: bool = False) -> Iterator[None]:
    """Inside it, matrix products in float32 on a GPU keep all bits of their operands; coarse: eleven of them, which tensor
    cores take about seven times as fast. Whatever torch was told before holds again afterwards.

    >>> with float32_products(coarse=True):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).tolist()
    [[2.0, 2.0], [2.0, 2.0]]
    """
    if not torch.cuda.is_initialized():
        yield
        return
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    try:
        before, mixed = torch.get_float32_matmul_precision(), False
    except RuntimeError:  # set under torch's newer names only, in a way that its older ones refuse to read
        before, mixed = "highest", True
    torch.set_float32_matmul_precision("high" if coarse else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        if mixed:
            torch.backends.cuda.matmul.fp32_precision = newer


def whole_float32() -> bool:
    """Whether torch was told that matrix products in float32 keep all bits of their operands, as they do by default.

    >>> whole_float32()
    True
    """
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set under torch's newer names only
        return torch.backends.cuda.matmul.fp32_precision != "tf32"
