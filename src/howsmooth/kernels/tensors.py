"""Tensors that come from outside: the gate they pass, where `.to` sends them, and what a refusal says of them."""

from collections.abc import Sequence
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
