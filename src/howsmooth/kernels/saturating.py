"""Sigmoid and tanh with derivatives that keep their digits where the functions are flat.

`σ(s)(1 − σ(s))` and `1 − tanh²(t)` cancel there: past `s = 37` they are zero in float64, whatever comes after them. The same
numbers as products, `σ(s) σ(−s)` and `1/cosh²(t)`, are exact to a few units in the last place until they underflow.
"""

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
