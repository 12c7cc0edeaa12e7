"""What a model's code may do to attention's logits that are not formed, step by step, until values come.

A step that is not among these is refused, so what is followed to the end is the code's own function.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.models import arithmetic, axes, weighing
from howsmooth.models.intercept import UncuttableError
from howsmooth.models.stand_ins import Logits, StandIn

PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
LESS = (torch.sub, Tensor.sub, Tensor.__sub__)
# what hands on a tensor's numbers
_SAME = (Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.contiguous)


def _unchanged(logits: Any, *_: Any, **__: Any) -> Any:
    return logits


def _in_place(step: Callable[..., Any]) -> Callable[..., Logits]:
    """The same written into the logits that it was done to."""

    def written(logits: Any, *args: Any, **kwargs: Any) -> Logits:
        found = step(logits, *args, **kwargs)
        if not isinstance(logits, Logits) or not isinstance(found, Logits) or found.shape != logits.shape:
            raise UncuttableError("logits written into something else")
        logits.past = found.past
        return logits

    return written


_SHAPES = (Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, Tensor.flatten, Tensor.unsqueeze, Tensor.squeeze)
_TABLE: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = (
    (arithmetic.times, (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)),
    (arithmetic.divide, (torch.div, Tensor.div, Tensor.__truediv__)),
    (arithmetic.negative, (torch.neg, Tensor.neg, Tensor.__neg__)),
    (arithmetic.add, (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)),
    (arithmetic.subtract, LESS),
    (arithmetic.subtracted, (torch.rsub, Tensor.__rsub__)),
    (arithmetic.power, (torch.square, Tensor.square, torch.pow, Tensor.pow, Tensor.__pow__)),
    (arithmetic.fill, (torch.masked_fill, Tensor.masked_fill)),
    (arithmetic.where, (torch.where,)),
    (weighing.largest, (torch.max, Tensor.max)),
    (weighing.floor, (torch.maximum, Tensor.maximum)),
    (weighing.row_max, (torch.amax, Tensor.amax)),
    (weighing.total, (torch.sum, Tensor.sum)),
    (arithmetic.norm, (torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm)),
    (weighing.softmax, (torch.softmax, Tensor.softmax, nn.functional.softmax)),
    (weighing.sigmoid, (torch.sigmoid, Tensor.sigmoid, nn.functional.sigmoid, torch.special.expit)),
    (weighing.exp, (torch.exp, Tensor.exp)),
    (weighing.tanh, (torch.tanh, Tensor.tanh, nn.functional.tanh)),
    (weighing.dropout, (nn.functional.dropout,)),
    (axes.joined, (torch.cat, torch.concat, torch.concatenate)),
    (axes.padded, (nn.functional.pad,)),
    (axes.item, (Tensor.__getitem__,)),
    (axes.parted, (torch.chunk, Tensor.chunk)),
    (weighing.values, PRODUCTS),
    (weighing.summed, (torch.einsum,)),
    (weighing.detached, (Tensor.detach,)),
    (_unchanged, _SAME),
)
_IN_PLACE: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = (
    (arithmetic.times, (Tensor.mul_, Tensor.__imul__)),
    (arithmetic.divide, (Tensor.div_, Tensor.__itruediv__)),
    (arithmetic.add, (Tensor.add_, Tensor.__iadd__)),
    (arithmetic.subtract, (Tensor.sub_, Tensor.__isub__)),
    (arithmetic.fill, (Tensor.masked_fill_,)),
)
_STEPS: dict[Any, Callable[..., Any]] = {func: step for step, funcs in _TABLE for func in funcs}
_STEPS |= {func: axes.shaped(func) for func in _SHAPES}
_STEPS |= {func: _in_place(step) for step, funcs in _IN_PLACE for func in funcs}
StandIn.steps = _STEPS
