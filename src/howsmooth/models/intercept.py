"""Standing where a model calls softmax attention: the library's attention and mask interfaces, and torch's own function.

Within `Intercept`, whoever calls the attention interface (with the implementation `howsmooth`) or
`F.scaled_dot_product_attention` gets our kernels, and the listener hears of each call.
"""

import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

from howsmooth.errors import BadFunctionError, BadInputError, HowSmoothError
from howsmooth.kernels import Mask, Scores, attend
from howsmooth.kernels.kinds import Softmax
from howsmooth.program import masks

IMPLEMENTATION = "howsmooth"
WRITTEN_OUT = "eager, followed"  # the model's plain code inside `ByHand`
_REMEMBERED = 64  # masks handed out and not forgotten; a forward pass makes a few


class UncuttableError(HowSmoothError):
    """An attention call that the kernels do not express; the caller falls back to the model's own code."""


@dataclass(frozen=True)
class Call:
    """One call of softmax attention. `scores` is nothing where only a softmax was seen."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Scores

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


@dataclass(frozen=True, eq=False)
class Answered:
    """A call of attention in a graph, and what it was answered with, (batch, heads, n, d_v)."""

    call: Call
    output: Tensor


Listener = Callable[[Call], Tensor]


class Tagged(NamedTuple):
    """A mask handed out: the storage that carries it, what it stands for, and what the library itself adds to the logits of
    some queries, (batch, 1, rows, m)."""

    carrier: Tensor
    mask: Mask
    rows: Callable[[Tensor], Tensor]


@dataclass
class Intercept:
    """What answers attention calls while it is active.

    on_call: answers a call with its output, (batch, heads, n, d_v).  masks: what each mask handed out stands for, by the
    storage that carries it.  refuse: the error for a call that the kernels do not express.
    """

    on_call: Listener
    masks: dict[int, Tagged] = field(default_factory=dict)
    refuse: Callable[[str], HowSmoothError] = UncuttableError

    @contextmanager
    def active(self) -> Iterator[None]:
        token = _ACTIVE.set(self)
        try:
            with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", torch_attention):
                yield
        finally:
            _ACTIVE.reset(token)

    def tag(
        self, mask: Mask, rows: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A tensor of the shape a model expects that only stands for `mask`: whoever reads its entries gets NaN."""
        carrier = torch.full((), torch.nan, dtype=dtype, device=device)
        self.masks[storage(carrier)] = Tagged(carrier, mask, rows)
        return carrier.expand(shape)

    def read(self, mask: Tensor | None, causal: bool, dtype: torch.dtype) -> Mask:
        """The mask behind what a model passes on."""
        if mask is None:
            return Mask(causal=causal)
        known = self.masks.get(storage(mask))
        if known is not None:
            return known.mask
        if mask.requires_grad:
            raise self.refuse("a mask that depends on the input")
        if mask.ndim != 4 or (mask.is_floating_point() and bool(mask.isnan().any())):
            raise self.refuse(f"a mask of shape {tuple(mask.shape)} that the model has rewritten")
        return masks.of_tensor(mask, dtype)

    def with_sink(self, sink: Tensor, heads: int) -> Softmax:
        """Softmax with a logit of every head's own beside the keys."""
        if sink.grad_fn is not None:
            raise self.refuse("attention sinks that depend on the input")
        if sink.numel() != heads or not bool(sink.isfinite().all()):
            raise self.refuse("attention sinks that are not one finite number per head")
        return Softmax(sink.flatten())


_RECORDED: ContextVar[bool] = ContextVar("recorded", default=False)
_ACTIVE: ContextVar[Intercept] = ContextVar("intercept")


def _active() -> Intercept:
    return _ACTIVE.get(None) or _BY_ITSELF


def answer(call: Call) -> Tensor:
    """What the listener says to a call."""
    return _active().on_call(call)


def storage(t: Tensor) -> int:
    """Where a tensor's numbers are, whichever of torch.func's transforms looks at it."""
    functorch = importlib.import_module("torch._C._functorch")
    while functorch.is_functorch_wrapped_tensor(t):
        t = functorch.get_unwrapped(t)
    return t.untyped_storage().data_ptr()


def torch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` on the kernels."""
    intercept = _active()
    lead = query.shape[:-2]
    q, k, v = (_four_axes(t) for t in (query, key, value))
    batch = q.shape[0]
    k, v = (t.expand(batch, -1, -1, -1) for t in (k, v))
    if attn_mask is not None:
        while attn_mask.ndim < query.ndim:
            attn_mask = attn_mask[None]
        attn_mask = _four_axes(attn_mask)
        attn_mask = attn_mask.expand(*attn_mask.shape[:3], k.shape[2])
    mask = intercept.read(attn_mask, is_causal, q.dtype)
    scores = Scores(q.shape[-1] ** -0.5 if scale is None else float(scale), None, mask)
    out = intercept.on_call(Call(q, k, v, scores))
    return out.reshape(*lead, *out.shape[-2:])


@contextmanager
def recording(model: nn.Module, name: str | None) -> Iterator[None]:
    """Inside it a model is recorded: with an attention implementation of that name, the library's calls kept whole.

    name: nothing for the model's own choice.
    """
    with ExitStack() as stack:
        flag = _RECORDED.set(True)
        stack.callback(_RECORDED.reset, flag)
        if name is not None:
            stack.enter_context(implementation(model, name))
        token = _ACTIVE.set(Intercept(answer_nothing))
        stack.callback(_ACTIVE.reset, token)
        yield


def answer_nothing(call: Call) -> Tensor:
    """A listener of a recording, which keeps calls as they are."""
    raise UncuttableError("attention that is called outside of the recording")


def _kept_whole(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: Tensor | None, **how: Any) -> Tensor:
    """The output of a call of the library's interface, which the recording under way keeps as one node."""
    dropout, causal, bias = how["dropout"], how["is_causal"], how["position_bias"]
    if dropout:
        raise BadFunctionError("expected attention without dropout, got some; call model.eval()")
    causal = bool(getattr(module, "is_causal", False)) if causal is None else bool(causal)
    known = None if given is None else _active().masks.get(storage(given))
    if known is not None:
        mask, terms = known.mask, [] if known.mask.bias is None else [known.mask.bias]
    else:
        mask = Mask(causal=causal and given is None and q.shape[2] > 1)
        terms = [] if given is None else [given]
    terms += [] if bias is None else [bias]
    scale = q.shape[-1] ** -0.5 if how["scaling"] is None else float(how["scaling"])
    return torch.ops.howsmooth.attention(
        q, k, v, terms, mask.keys, how["sink"], scale, how["softcap"], mask.causal, mask.window
    )


def _four_axes(t: Tensor) -> Tensor:
    """(…, heads, n, d), at least (n, d), as (batch, heads, n, d)."""
    if t.ndim == 3:
        return t[:, None]
    return t[None, None] if t.ndim == 2 else t.reshape(-1, *t.shape[-3:])


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
    **kwargs: Any,  # what other implementations ask for; the output is compared with the model's own
) -> tuple[Tensor, None]:
    """The attention interface's function: (batch, heads, n, d) in, (batch, n, heads, d_v) out."""
    intercept = _active()
    if get_proxy_mode() is not None:
        how = {"scaling": scaling, "dropout": dropout, "softcap": softcap, "is_causal": is_causal}
        more = {"position_bias": position_bias, "sink": s_aux}
        return _kept_whole(module, query, key, value, attention_mask, **how, **more).transpose(1, 2).contiguous(), None
    if dropout:
        raise intercept.refuse("dropout, as in training")
    causal = bool(getattr(module, "is_causal", False)) if is_causal is None else bool(is_causal)
    mask = intercept.read(attention_mask, causal and attention_mask is None and query.shape[2] > 1, query.dtype)
    if position_bias is not None:
        if position_bias.requires_grad:
            raise intercept.refuse("a position bias that depends on the input")
        mask = masks.with_bias(mask, position_bias.detach())
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    kind = Softmax() if s_aux is None else intercept.with_sink(s_aux, query.shape[1])
    out = intercept.on_call(Call(query, key, value, Scores(scale, softcap, mask, kind)))
    return out.transpose(1, 2).contiguous(), None


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
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    if int(q_offset) or int(kv_offset):
        raise _active().refuse("a mask with offsets, as a cache makes it")
    device = torch.device(device)
    rule: Any = causal_mask_function if mask_function is None else mask_function
    keys = None if attention_mask is None else attention_mask[:, :kv_length].bool()
    own = {"batch_size": batch_size, "kv_length": kv_length, "mask_function": rule, "use_vmap": use_vmap, "device": device}

    def one_by_one(item: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """A rule of the model's own, which may not broadcast."""
        start = int(query.flatten()[0])
        return sdpa_mask(q_length=query.numel(), q_offset=start, allow_is_causal_skip=False, **own)  # pyright: ignore

    def rows(index: Tensor) -> Tensor:
        """As plain code has them, in float32: the lowest number of float64 would overflow where the model casts."""
        given: Any = {"attention_mask": attention_mask, "dtype": torch.float32, **own}
        return torch.cat([eager_mask(q_length=1, q_offset=i, **given) for i in index.tolist()], dim=2)

    with disable_proxy_modes_tracing():  # what a recording keeps of a mask is what it stands for
        if rule is causal_mask_function and keys is None and q_length == kv_length:
            mask = Mask(causal=q_length > 1)  # to evaluate the rule would be to wait for the device
        else:
            mask = masks.of_rule(one_by_one if use_vmap else rule, batch_size, q_length, kv_length, keys, device)
        return _active().tag(mask, rows, (batch_size, 1, q_length, kv_length), dtype, device)


class _Recent(OrderedDict[int, Tagged]):
    """Remembers the last few entries."""

    def __setitem__(self, key: int, value: Tagged) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > _REMEMBERED:
            self.popitem(last=False)


def _refuse(reason: str) -> BadInputError:
    return BadInputError(
        f"expected attention over whole sequences with a fixed mask, got {reason}; "
        "call model.eval() and pass use_cache=False, or take attn_implementation='eager'"
    )


# what answers calls of the implementation `howsmooth` while no other is active
_BY_ITSELF = Intercept(lambda call: attend(*call.qkv, call.scores), _Recent(), _refuse)


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


_CHOICES = ("_attn_implementation_internal", "_experts_implementation_internal")


def configurations(model: nn.Module) -> list[Any]:
    """Every configuration inside `model` that chooses an attention implementation."""
    return list({id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), _CHOICES[0])}.values())


@contextmanager
def implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Every configuration inside `model` set to an attention implementation, and back.

    Experts go to their plain code, the only one that knows float64.
    """
    before = [(c, key, getattr(c, key)) for c in configurations(model) for key in _CHOICES if hasattr(c, key)]
    try:
        for config, key, _ in before:
            if key == _CHOICES[0] or not _RECORDED.get():
                setattr(config, key, name if key == _CHOICES[0] and name != WRITTEN_OUT else "eager")
        yield
    finally:
        for config, key, old in before:
            setattr(config, key, old)
