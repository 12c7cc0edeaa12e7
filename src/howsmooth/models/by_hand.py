"""Attention that a model's own code writes out, followed step by step: logits, factors, biases, weights, values.

Inside `ByHand` a product of two batches of vectors that is square in tokens is not formed, nor are the distances between them.
`Logits` stands for it, remembers what the code does to it (`howsmooth.models.steps`), and once values come it is one call of
attention.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from howsmooth.models.arithmetic import add
from howsmooth.models.einsum import scores_of
from howsmooth.models.past import Past, called
from howsmooth.models.stand_ins import Logits, StandIn
from howsmooth.models.steps import LESS, PRODUCTS

_ADDED = (torch.baddbmm, Tensor.baddbmm)


class ByHand(TorchFunctionMode):
    """Inside it, attention that is written out becomes calls of attention, or whatever `attend` makes of it."""

    def __init__(self, attend: Callable[[Past, Tensor], Tensor] = called):
        super().__init__()
        self._attend = attend

    def _logits(self, a: Tensor, b: Tensor) -> Logits:
        return Logits.of(Past(a, b.mT, self._attend), (*a.shape[:-1], b.shape[-1]))

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not any(issubclass(t, StandIn) for t in types):
            found = self._begun(func, args, kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)

    def _begun(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Logits | None:
        """Logits, where a function makes some of plain tensors."""
        if func in PRODUCTS and not kwargs and len(args) == 2 and square(*args):
            return self._logits(*args)
        if func is torch.einsum and not kwargs and len(args) == 3:
            pair = scores_of(*args)
            return None if pair is None or not square(pair[0], pair[1].mT) else self._logits(pair[0], pair[1].mT)
        if func in _ADDED:
            names = ("input", "batch1", "batch2")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            added, a, b = (given[name] for name in names)
            if square(a, b):
                product = self._logits(a, b)
                whole = Logits.of(replace(product.past, scale=float(given.get("alpha", 1))), product.shape)
                return add(whole, added * given.get("beta", 1))
        if func is torch.cdist and len(args) == 2 and set(kwargs) <= {"p", "compute_mode"} and kwargs.get("p", 2) == 2:
            a, b = args
            if square(a, b.mT):
                return Logits.of(Past(a, b, self._attend, "distance"), (*a.shape[:-1], b.shape[-2]))
        if func in LESS and not kwargs and len(args) == 2:
            return self._differences(*args)
        return None

    def _differences(self, a: Any, b: Any) -> Logits | None:
        """`a_i − b_j` for all i and j, in whichever order they come."""
        if type(a) is not Tensor or type(b) is not Tensor or a.ndim != b.ndim or a.ndim < 4 or not a.is_floating_point():
            return None
        if a.shape[-3] == 1:
            a, b = b, a
        if a.shape[-2] != 1 or b.shape[-3] != 1 or not square(a.squeeze(-2), b.squeeze(-3).mT):
            return None
        q, k = a.squeeze(-2), b.squeeze(-3)
        return Logits.of(Past(q, k, self._attend, "differences"), (*q.shape[:-1], *k.shape[-2:]))


def makes_pairs(func: Any, args: tuple) -> bool:
    """Whether a function's result has a number for each pair of tokens."""
    if func is torch.einsum:
        pair = scores_of(*args) if len(args) == 3 else None
        return pair is not None and square(pair[0], pair[1].mT)
    return func in PRODUCTS and len(args) == 2 and square(*args)


def square(a: Any, b: Any) -> bool:
    """Whether a product is square in tokens."""
    plain = type(a) is Tensor and type(b) is Tensor and a.ndim == b.ndim and a.ndim in (3, 4, 5)
    return plain and a.shape[:-2] == b.shape[:-2] and a.shape[-2] == b.shape[-1] and a.shape[-1] == b.shape[-2]
