"""Tensors that come from outside: the gate they pass, where `.to` sends them; and arithmetic that keeps their digits.

`σ(s)(1 − σ(s))` and `1 − tanh²(t)` cancel where the functions are flat: past `s = 37` they are zero in float64, whatever comes
after them. The same numbers as products, `σ(s) σ(−s)` and `1/cosh²(t)`, are exact to a few units in the last place until they
underflow. Torch's own float32 matrix products on a GPU keep their digits where they are told to.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.nn.parameter import is_lazy

from howsmooth.errors import BadInputError
from howsmooth.settings import shown

Place = torch.device | torch.dtype | str | int | None  # what torch's `.to` takes first

_RULES = "__torch_dispatch__"  # how a kind of tensor computes
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # smaller floats have no arithmetic of their own


def place(device: Place, dtype: Place) -> tuple[torch.device | None, torch.dtype | None]:
    """What `.to("cuda")`, `.to(torch.float64)` or `.to(device, dtype)` asks for; `None` leaves either as it is.

    >>> place(torch.float64, None)
    (None, torch.float64)
    """
    if isinstance(device, torch.dtype):
        device, dtype = dtype, device
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in REAL):
        got = dtype if isinstance(dtype, torch.dtype) else shown(dtype)
        raise BadInputError(f"expected a floating-point dtype of torch, got {got}; pass torch.float32 or torch.float64")
    return None if device is None else _device(device), dtype


def _device(device: Place) -> torch.device:
    """A device that is there and holds numbers."""
    try:
        there = torch.device(device)  # pyright: ignore[reportArgumentType]  dtypes raise
        if there.type == "cpu" or (there.type != "meta" and torch.empty(0, device=there).numel() == 0):
            return there
    except (RuntimeError, TypeError, ValueError, ArithmeticError, AssertionError, ImportError):  # torch has one for each case
        pass
    got = shown(str(device) if isinstance(device, torch.device) else device)
    raise BadInputError(f"expected a device that is there, such as 'cpu' or 'cuda:0', or a dtype, got {got}; pass one of them")


def described(t: object) -> str:
    """What was given where a tensor was expected: its precision and shape, why its numbers cannot be read, or its type.

    >>> described(torch.zeros(2, 3)), described([0.0]), described(torch.zeros(2, 3).to_sparse())
    ('torch.float32 of shape (2, 3)', 'list', 'a sparse_coo tensor')
    """
    if not isinstance(t, Tensor):
        return type(t).__name__
    kind = _unreadable(t)
    return f"{t.dtype} of shape {tuple(t.shape)}" if kind is None else f"a {kind} tensor"


def _unreadable(t: Tensor) -> str | None:
    """What keeps the numbers of a tensor from being read as they are: no dense storage, or none at all."""
    if is_lazy(t):
        return "lazy"
    if t.is_nested:
        return "nested"
    if getattr(type(t), _RULES) is not getattr(Tensor, _RULES):  # a wrapper around something else
        return type(t).__name__
    if t.layout is not torch.strided:
        return str(t.layout).removeprefix("torch.").removeprefix("_")
    return "meta" if t.is_meta else "quantised" if t.is_quantized else None


def check_dense(t: object, what: str) -> None:
    """Refuse a tensor whose numbers cannot be read: sparse, nested, meta, quantised, lazy, or a wrapper of something else."""
    if isinstance(t, Tensor) and _unreadable(t) is not None:
        raise BadInputError(f"expected {what} in a dense tensor with numbers in it, got {described(t)}; pass an ordinary one")


def check_tensor(t: Any, what: str, axes: tuple[str | int, ...], fix: str, *, finite: bool = True) -> None:
    """Refuse what is not a floating-point tensor with entries and with these axes: names for any length, or the length."""
    check_dense(t, what)
    fits = isinstance(t, Tensor) and t.dtype in REAL and t.numel() > 0 and t.ndim == len(axes)
    if not fits or any(want != got for want, got in zip(axes, t.shape, strict=True) if isinstance(want, int)):
        expected = ", ".join(str(axis) for axis in axes)
        raise BadInputError(f"expected {what} as a floating-point tensor ({expected}), got {described(t)}; {fix}")
    if finite:
        check_finite(t, what)


def check_finite(t: Tensor, what: str) -> None:
    """Refuse NaN and infinity."""
    bad = int((~t.isfinite()).sum())
    if bad:
        raise BadInputError(f"expected finite {what}, got {bad} NaN or infinite entries of {t.numel()}; clean the {what}")


def heads_last(shape: Sequence[int], like: Tensor) -> Tensor:
    """An empty (…, batch, heads, n, d) whose heads lie beside each other in memory, as the projection after them reads it."""
    *lead, heads, n, d = shape
    strides, size = (d, heads * d, 1), heads * n * d
    for axis in reversed(lead):
        strides, size = (size, *strides), size * axis
    return like.new_empty_strided(tuple(shape), strides)


def numbers(t: Tensor) -> list[float]:
    """What a tensor holds, read beside a recording that is under way: it decides whether there is an answer, not which.

    >>> numbers(torch.ones(2))
    [1.0, 1.0]
    """
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        return t.tolist()


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
