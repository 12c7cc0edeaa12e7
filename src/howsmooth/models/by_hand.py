"""Attention that a model's own code writes out, followed step by step: logits, factors, biases, softmax, values.

Inside `ByHand` a product of two batches of vectors that is square in tokens is not formed. `Logits` stands for it, remembers
what the code does to it, and once values come it is one call of attention. A step that is not among those below is refused, so
what is followed to the end is the code's own function.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from howsmooth.kernels import Mask, Scores
from howsmooth.models import masks
from howsmooth.models.intercept import Call, UncuttableError, answer

_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
_ADDED = (torch.baddbmm, Tensor.baddbmm)
_LOW = -1e4  # a fill this low hides a key
# what says something of a tensor, and what hands on its numbers
_QUESTIONS = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex)
_SAME = (Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.contiguous)


@dataclass(frozen=True)
class Past:
    """What a `Logits` is: `scale · q kᵀ` plus terms, (batch, heads, n, m) each, behind a softmax where `weights`.

    attend: what gives the output for values, (batch, heads, m, d_v).
    """

    q: Tensor
    k: Tensor
    attend: "Callable[[Past, Tensor], Tensor]"
    scale: float = 1.0
    terms: tuple[Tensor, ...] = ()
    weights: bool = False


class Logits(Tensor):
    """Stands for logits that are not formed, or for attention weights. Whoever reads its entries is refused."""

    past: Past

    @classmethod
    def of(cls, past: Past, shape: torch.Size) -> "Logits":
        logits = torch.full((), torch.nan, dtype=past.q.dtype, device=past.q.device).expand(shape).as_subclass(cls)
        logits.past = past
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _QUESTIONS or getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs)
        step = _STEPS.get(func)
        if step is None:
            raise UncuttableError(f"{getattr(func, '__name__', func)} of attention's logits")
        return step(*args, **kwargs)


def called(past: Past, v: Tensor) -> Tensor:
    """The output as one call of attention."""
    mask = Mask()
    for term in past.terms:
        read = masks.from_tensor(term.expand(*term.shape[:3], past.k.shape[2]), past.q.dtype)
        mask = _both(mask, read)
    return answer(Call(past.q, past.k, v, Scores(past.scale, None, mask)))


class ByHand(TorchFunctionMode):
    """Inside it, attention that is written out becomes calls of attention, or whatever `attend` makes of it."""

    def __init__(self, attend: Callable[[Past, Tensor], Tensor] = called):
        super().__init__()
        self._attend = attend

    def _logits(self, a: Tensor, b: Tensor) -> Logits:
        return Logits.of(Past(_four(a), _four(b.mT), self._attend), torch.Size((*a.shape[:-1], b.shape[-1])))

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not kwargs and len(args) == 2 and func in _PRODUCTS and _square(*args):
            return self._logits(*args)
        if func in _ADDED and not any(isinstance(a, Logits) for a in args):
            names = ("input", "batch1", "batch2")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            added, a, b = (given[name] for name in names)
            if _square(a, b):
                product = self._logits(a, b)
                whole = Logits.of(replace(product.past, scale=float(given.get("alpha", 1))), product.shape)
                return _add(whole, added * given.get("beta", 1))
        return func(*args, **kwargs)


def _square(a: Any, b: Any) -> bool:
    """Whether a product is square in tokens."""
    plain = type(a) is Tensor and type(b) is Tensor and a.ndim == b.ndim and a.ndim in (3, 4)
    return plain and a.shape[:-2] == b.shape[:-2] and a.shape[-2] == b.shape[-1] and a.shape[-1] == b.shape[-2]


def _four(t: Tensor) -> Tensor:
    """(batch, heads, n, ·), heads alone first where there are three axes."""
    return t[None] if t.ndim == 3 else t


def _before(logits: Any) -> Past:
    if not isinstance(logits, Logits) or logits.past.weights:
        raise UncuttableError("arithmetic on attention weights")
    return logits.past


def _times(logits: Any, factor: Any, *, inverse: bool = False) -> Logits:
    if not isinstance(logits, Logits):
        logits, factor = factor, logits
        if inverse:
            raise UncuttableError("one over attention's logits")
    past = _before(logits)
    if isinstance(factor, Tensor) and (factor.numel() != 1 or factor.requires_grad):
        raise UncuttableError("logits times a tensor")
    number = 1 / float(factor) if inverse else float(factor)
    return Logits.of(replace(past, scale=past.scale * number, terms=tuple(t * number for t in past.terms)), logits.shape)


def _add(logits: Any, other: Any, *, alpha: float = 1, sign: float = 1.0) -> Logits:
    if not isinstance(logits, Logits):
        logits, other = other, logits
        if sign < 0:
            raise UncuttableError("something minus attention's logits")
    past = _before(logits)
    if isinstance(other, int | float):  # the same for all keys
        return logits
    if isinstance(other, Logits) or other.requires_grad:
        raise UncuttableError("a bias that depends on the input")
    while other.ndim < logits.ndim:
        other = other[None]
    return Logits.of(replace(past, terms=(*past.terms, _four(sign * alpha * other))), logits.shape)


def _subtract(logits: Any, other: Any, *, alpha: float = 1) -> Logits:
    return _add(logits, other, alpha=alpha, sign=-1.0)


def _fill(logits: Any, mask: Tensor, value: Any) -> Logits:
    if not float(value) <= _LOW:
        raise UncuttableError("logits that are overwritten")
    hidden = torch.zeros(mask.shape, dtype=logits.dtype, device=mask.device).masked_fill(mask.bool(), -torch.inf)
    return _add(logits, hidden)


def _floor(logits: Any, least: Any) -> Logits:
    """A floor under all numbers that a mask writes is none."""
    _before(logits)
    if not isinstance(least, Tensor) or least.numel() != 1 or not float(least) <= 0.5 * torch.finfo(torch.float32).min:
        raise UncuttableError("logits with a floor")
    return logits


def _where(mask: Tensor, logits: Any, value: Any) -> Logits:
    return _fill(logits, ~mask.bool(), value)


def _softmax(logits: Any, dim: int | None = None, *_: Any, **__: Any) -> Logits:
    past = _before(logits)
    if dim not in (-1, logits.ndim - 1):
        raise UncuttableError("a softmax over queries")
    return Logits.of(replace(past, weights=True), logits.shape)


def _dropout(weights: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Logits:
    if training and p:
        raise UncuttableError("dropout, as in training")
    return weights


def _shaped(logits: Any, *shape: Any) -> Logits:
    """The same with one axis more or less in front, for a batch of one."""
    wanted = torch.empty(logits.shape, device="meta").reshape(*shape).shape
    if wanted[-2:] != logits.shape[-2:] or wanted[:-2].numel() != math.prod(logits.past.q.shape[:2]) or len(wanted) > 4:
        raise UncuttableError(f"logits in the shape {tuple(wanted)}")
    if tuple(_leading(wanted)) != tuple(logits.past.q.shape[:2]):
        raise UncuttableError("logits of several sequences in a row")
    return Logits.of(logits.past, wanted)


def _leading(shape: torch.Size) -> tuple[int, int]:
    return (1, shape[0]) if len(shape) == 3 else (shape[0], shape[1])


def _values(weights: Any, v: Any) -> Tensor:
    if not isinstance(weights, Logits) or not weights.past.weights or isinstance(v, Logits):
        raise UncuttableError("a product with attention's logits")
    out = weights.past.attend(weights.past, _four(v))
    return out.reshape(*weights.shape[:-1], v.shape[-1])


def _both(one: Mask, other: Mask) -> Mask:
    """What two masks leave together."""
    if one.keys is not None and other.keys is not None:
        other = replace(other, keys=one.keys & other.keys)
    windows = [w for w in (one.window, other.window) if w is not None]
    keys = one.keys if other.keys is None else other.keys
    bias = other.bias if one.bias is None else one.bias if other.bias is None else one.bias + other.bias
    return Mask(one.causal or other.causal, min(windows, default=None), keys, bias)


def _divide(logits: Any, factor: Any) -> Logits:
    return _times(logits, factor, inverse=True)


def _unchanged(logits: Any, *_: Any, **__: Any) -> Any:
    return logits


_TABLE: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = (
    (_times, (torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__)),
    (_divide, (torch.div, Tensor.div, Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__)),
    (_add, (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)),
    (_subtract, (torch.sub, Tensor.sub, Tensor.__sub__, Tensor.__isub__)),
    (_fill, (torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_)),
    (_where, (torch.where,)),
    (_floor, (torch.max, torch.maximum, Tensor.maximum)),
    (_softmax, (torch.softmax, Tensor.softmax, nn.functional.softmax)),
    (_dropout, (nn.functional.dropout,)),
    (_shaped, (Tensor.view, Tensor.reshape, torch.reshape)),
    (_values, _PRODUCTS),
    (_unchanged, _SAME),
)
_STEPS: dict[Any, Callable[..., Any]] = {func: step for step, funcs in _TABLE for func in funcs}
