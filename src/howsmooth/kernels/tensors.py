"""Tensors that come from outside: where `.to` sends them, and what a refusal says of them."""

from typing import Any

import torch
from torch import Tensor

from howsmooth.errors import BadInputError

Place = torch.device | torch.dtype | str | int | None  # what torch's `.to` takes first


def place(device: Place, dtype: Place) -> tuple[torch.device | None, torch.dtype | None]:
    """What `.to("cuda")`, `.to(torch.float64)` or `.to(device, dtype)` asks for; `None` leaves either as it is.

    >>> place(torch.float64, None)
    (None, torch.float64)
    """
    if isinstance(device, torch.dtype):
        device, dtype = dtype, device
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise BadInputError(f"expected a floating-point dtype of torch, got {dtype!r}; pass torch.float32 or torch.float64")
    try:
        return None if device is None else torch.device(device), dtype  # pyright: ignore[reportArgumentType]  dtypes raise
    except (RuntimeError, TypeError):
        raise BadInputError(
            f"expected a device such as 'cpu' or 'cuda:0', or a dtype, got {device!r}; pass one of them"
        ) from None


def described(t: object) -> str:
    """What was given where a tensor was expected: its precision and shape, or its type.

    >>> described(torch.zeros(2, 3)), described([0.0])
    ('torch.float32 of shape (2, 3)', 'list')
    """
    return f"{t.dtype} of shape {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__


def check_tensor(t: Any, what: str, axes: tuple[str | int, ...], fix: str, *, finite: bool = True) -> None:
    """Refuse what is not a floating-point tensor with entries and with these axes: names for any length, or the length."""
    fits = isinstance(t, Tensor) and t.is_floating_point() and t.numel() > 0 and t.ndim == len(axes)
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
