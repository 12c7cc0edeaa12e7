"""Where tensors live, named as torch names it: `.to("cuda")`, `.to(torch.float64)`, `.to(device, dtype)`."""

import torch

from howsmooth.errors import BadInputError

Place = torch.device | torch.dtype | str | int | None  # what torch's `.to` takes first


def place(device: Place, dtype: Place) -> tuple[torch.device | None, torch.dtype | None]:
    """The device and the precision that `.to` is asked for; `None` leaves either as it is.

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
