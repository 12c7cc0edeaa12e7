"""Working precision: what models cast down, kept."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SINGLE = torch.float32
_CASTS = (Tensor.to, Tensor.type)
_REDUCTIONS = (torch.softmax, Tensor.softmax, torch.nn.functional.softmax, torch.mean, Tensor.mean, torch.sum, Tensor.sum)


class KeepDouble(TorchFunctionMode):
    """Inside it, a request for float32 gives float64.

    Model code casts to float32 in norms, softmax and rotary phases so that half precision survives them; in a float64 model
    the same casts throw digits away. With this mode the model is the function its formulas say.

    >>> with KeepDouble():
    ...     print(torch.ones(1, dtype=torch.float64).float().dtype)
    torch.float64
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float:
            func = Tensor.double
        elif func in _CASTS:
            args = tuple(torch.float64 if a is _SINGLE else a for a in args)
        if kwargs.get("dtype") is _SINGLE and (func in _CASTS or func in _REDUCTIONS):
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
