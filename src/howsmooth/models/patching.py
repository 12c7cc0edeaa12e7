"""Putting `sdpa` where models call torch's attention."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

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
    second derivatives.

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
    O(n) memory: whole sequences without a cache or dropout. Layers of a model of diffusers that choose an attention backend
    are set to `"howsmooth"`. Any other runs inside `use_sdpa`.

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
    chosen = [m.processor for m in model.modules() if hasattr(getattr(m, "processor", None), "_attention_backend")]
    if chosen and "diffusers" in sys.modules:
        name = register_backend()
        for processor in chosen:
            setattr(processor, "_attention_backend", name)  # noqa: B010, of another library
    if model not in _PATCHED:
        _PATCHED.add(model)
        model.register_forward_pre_hook(_enter)
        model.register_forward_hook(_leave, always_call=True)
    return model


def _enter(*_: Any) -> None:
    _PLACE.enter()


def _leave(*_: Any) -> None:
    _PLACE.leave()


def _backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """What diffusers calls: (batch, tokens, heads, width) in and out; a mask of two axes is (batch, keys)."""
    if _parallel_config is not None or return_lse:
        got = "diffusers' context parallelism" if _parallel_config is not None else "a log-sum-exp that is asked for"
        raise BadInputError(f"expected whole sequences and their outputs alone, got {got}; use howsmooth.context_parallel")
    if attn_mask is not None and attn_mask.ndim == 2 and attn_mask.shape == (len(query), key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)


def register_backend() -> Any:
    """Make `"howsmooth"` a name of an attention backend of diffusers, and give it.

    Names are the members of an enumeration there, which its registry of backends, open to functions, is asked by.
    """
    dispatch = importlib.import_module("diffusers.models.attention_dispatch")
    names: Any = dispatch.AttentionBackendName
    if IMPLEMENTATION not in names._value2member_map_:
        name = str.__new__(names, IMPLEMENTATION)
        name._name_, name._value_ = IMPLEMENTATION.upper(), IMPLEMENTATION
        names._member_map_[name._name_] = names._value2member_map_[IMPLEMENTATION] = name
        names._member_names_.append(name._name_)
        dispatch._AttentionBackendRegistry.register(name)(_backend)
    return names(IMPLEMENTATION)


if "diffusers" in sys.modules:
    register_backend()
if "transformers" in sys.modules:
    register()
