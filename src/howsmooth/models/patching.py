"""Putting `sdpa` where models call torch's attention."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any
from weakref import WeakSet

from torch import nn

from howsmooth.errors import BadInputError
from howsmooth.kernels import sdpa
from howsmooth.models.interface import CHOICE, IMPLEMENTATION, register
from howsmooth.program.modules import configurations, written_path

_NAME = "scaled_dot_product_attention"
_TORCHS = getattr(nn.functional, _NAME)


class _Place:
    """Torch's function, replaced while anybody asks for it."""

    def __init__(self) -> None:
        self.users, self.lock, self.before = 0, Lock(), ExitStack()

    def enter(self) -> None:
        with self.lock:
            if self.users == 0:
                # a fused layer of torch's would pass attention by, and has no forward mode
                self.before.enter_context(written_path())
                function = getattr(nn.functional, _NAME)
                self.before.callback(setattr, nn.functional, _NAME, function)
                if function is _TORCHS:  # else somebody stands there already, as a measurement does
                    setattr(nn.functional, _NAME, sdpa)
            self.users += 1

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.before.close()


_PLACE = _Place()
_PATCHED: WeakSet[nn.Module] = WeakSet()


@contextmanager
def use_sdpa() -> Iterator[None]:
    """Inside it `torch.nn.functional.scaled_dot_product_attention` is `howsmooth.sdpa`, in every thread.

    So whatever calls torch's function by that name (timm, diffusers, `nn.MultiheadAttention`, plain torch) has forward mode and
    second derivatives. Dropout of attention must be off.

    >>> import torch
    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> x = torch.randn(1, 4, 8)
    >>> with use_sdpa():
    ...     torch.func.jvp(layer, (x,), (x,))[1].shape
    torch.Size([1, 4, 8])
    """
    _PLACE.enter()
    try:
        yield
    finally:
        _PLACE.leave()


def patch(model: nn.Module) -> nn.Module:
    """The model itself, whose attention is `howsmooth.sdpa` from now on.

    A model of the transformers library is set to `attn_implementation="howsmooth"`, which reads masks as rules and so keeps
    O(n) memory: whole sequences without a cache or dropout. Any other runs inside `use_sdpa`.

    Args:
        model: A module of any library.

    Returns:
        The same module.

    >>> import torch
    >>> layer = patch(nn.TransformerEncoderLayer(8, 2, batch_first=True).eval())
    >>> x = torch.randn(1, 4, 8)
    >>> torch.func.jvp(layer, (x,), (x,))[1].shape
    torch.Size([1, 4, 8])
    """
    if not isinstance(model, nn.Module):
        raise BadInputError(f"expected a torch.nn.Module, got {type(model).__name__}; pass the model itself")
    own = configurations(model, CHOICE)
    if own:
        register()
    for config in own:
        config._attn_implementation = IMPLEMENTATION
    if model not in _PATCHED:
        _PATCHED.add(model)
        model.register_forward_pre_hook(_enter)
        model.register_forward_hook(_leave, always_call=True)
    return model


def _enter(*_: Any) -> None:
    _PLACE.enter()


def _leave(*_: Any) -> None:
    _PLACE.leave()


if "transformers" in sys.modules:
    register()
