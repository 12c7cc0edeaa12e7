"""The door of the transformers library: its attention and mask interfaces, on the kernels or kept whole by a recording."""

import functools
import importlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

from howsmooth.errors import BadInputError
from howsmooth.kernels import Mask, Scores, attend
from howsmooth.kernels.kinds import Softmax
from howsmooth.program import masks

IMPLEMENTATION = "howsmooth"
_REMEMBERED = 64  # masks handed out and not forgotten; a forward pass makes a few
CHOICE = "_attn_implementation_internal"


class HandedOut(NamedTuple):
    """A mask that was handed out: the tensor that carries it, and what it stands for."""

    carrier: Tensor
    mask: Mask


_HANDED_OUT: OrderedDict[int, HandedOut] = OrderedDict()  # by the storage of the carrier, the latest ones


def _hand_out(mask: Mask, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of the shape a model expects that only stands for a mask: whoever reads its entries gets NaN."""
    carrier = torch.full((), torch.nan, dtype=dtype, device=device)
    _HANDED_OUT[_storage(carrier)] = HandedOut(carrier, mask)
    while len(_HANDED_OUT) > _REMEMBERED:
        _HANDED_OUT.popitem(last=False)
    return carrier.expand(shape)


def _storage(t: Tensor) -> int:
    """Where a tensor's numbers are, whichever of torch.func's transforms looks at it."""
    functorch = importlib.import_module("torch._C._functorch")
    while functorch.is_functorch_wrapped_tensor(t):
        t = functorch.get_unwrapped(t)
    return t.untyped_storage().data_ptr()


def _refused(reason: str) -> BadInputError:
    return BadInputError(
        f"expected attention over whole sequences with a fixed mask, got {reason}; "
        "call model.eval() and pass use_cache=False, or take attn_implementation='eager'"
    )


def _library_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,  # what other implementations take; the output is compared with the model's own
) -> tuple[Tensor, None]:
    """The attention interface's function: (batch, heads, n, d) in, (batch, n, heads, d_v) out."""
    if dropout:
        raise _refused("dropout, as in training")
    causal = bool(getattr(module, "is_causal", False)) if is_causal is None else bool(is_causal)
    causal = causal and attention_mask is None and query.shape[2] > 1
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    known = None if attention_mask is None else _HANDED_OUT.get(_storage(attention_mask))
    mask = Mask(causal=causal) if known is None else known.mask
    if get_proxy_mode() is not None:
        terms = [t for t in (mask.bias, attention_mask if known is None else None, position_bias) if t is not None]
        how = scale, softcap, mask.causal, mask.window
        out = torch.ops.howsmooth.attention(query, key, value, terms, mask.keys, s_aux, *how)
        return out.transpose(1, 2).contiguous(), None
    if known is None and attention_mask is not None:
        mask = _read(attention_mask, query.dtype)
    if position_bias is not None:
        if position_bias.requires_grad:
            raise _refused("a position bias that depends on the input")
        mask = masks.joined(mask, Mask(bias=position_bias.detach()))
    kind = Softmax() if s_aux is None else _with_sink(s_aux, query.shape[1])
    return attend(query, key, value, Scores(scale, softcap, mask, kind)).transpose(1, 2).contiguous(), None


def _read(mask: Tensor, dtype: torch.dtype) -> Mask:
    """What a mask that the interface did not hand out stands for."""
    if mask.requires_grad:
        raise _refused("a mask that depends on the input")
    if mask.ndim != 4 or (mask.is_floating_point() and bool(mask.isnan().any())):
        raise _refused(f"a mask of shape {tuple(mask.shape)} that the model has rewritten")
    return masks.of_tensor(mask, dtype)


def _with_sink(sink: Tensor, heads: int) -> Softmax:
    """Softmax with a logit of every head's own beside the keys."""
    if sink.grad_fn is not None:
        raise _refused("attention sinks that depend on the input")
    if sink.numel() != heads or not bool(sink.isfinite().all()):
        raise _refused("attention sinks that are not one finite number per head")
    return Softmax(sink.flatten())


def _library_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,  # hints for other implementations
) -> Tensor:
    """The mask interface's function: reads the rule instead of filling a matrix with it."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if int(q_offset) or int(kv_offset):
        raise _refused("a mask with offsets, as a cache makes it")
    device = torch.device(device)
    rule: Any = causal_mask_function if mask_function is None else mask_function

    def one_by_one(item: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """A rule of the model's own, which may not broadcast."""
        start = int(query.flatten()[0])
        own = {"batch_size": batch_size, "kv_length": kv_length, "mask_function": rule, "use_vmap": use_vmap, "device": device}
        return sdpa_mask(q_length=query.numel(), q_offset=start, allow_is_causal_skip=False, **own)  # pyright: ignore

    # what a recording keeps of a mask is what it stands for
    with disable_proxy_modes_tracing() if get_proxy_mode() is not None else nullcontext():
        keys = None if attention_mask is None else attention_mask[:, :kv_length].bool()
        if rule is causal_mask_function and keys is None and q_length == kv_length:
            mask = Mask(causal=q_length > 1)  # to evaluate the rule would be to wait for the device
        else:
            mask = masks.of_rule(one_by_one if use_vmap else rule, batch_size, q_length, kv_length, keys, device)
        return _hand_out(mask, (batch_size, 1, q_length, kv_length), dtype, device)


@functools.cache
def register() -> None:
    """Make `attn_implementation="howsmooth"` known to transformers, as `load`, `patch` and importing the package beside it do.

    Every model of the library that asks for it by name runs on the kernels, forwards, backwards and in forward mode, in
    O(n · d) memory, up to second derivatives. For whole sequences in eval mode; a cache or dropout is refused.

    >>> register()
    >>> import torch
    >>> from transformers import GPT2Config, GPT2Model
    >>> size = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 4, "vocab_size": 5}
    >>> config = GPT2Config(**size, bos_token_id=0, eos_token_id=0, attn_implementation="howsmooth")
    >>> model = GPT2Model(config).eval()
    >>> x = torch.randn(1, 4, 8)
    >>> torch.func.jvp(lambda x: model(inputs_embeds=x, use_cache=False).last_hidden_state, (x,), (x,))[1].shape
    torch.Size([1, 4, 8])
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _library_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _library_mask)
