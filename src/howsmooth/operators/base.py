"""What a Jacobian is to a solver: two products, for several probes and several inputs at once."""

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor


class Operator(ABC):
    """A batch of linear maps from `in_shape` to `out_shape`, one per input of the batch.

    Vectors carry two leading axes, (probes, batch). A product never mixes probes or items.
    """

    batch: int
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def jvp(self, v: Float[Tensor, "probes batch *in_shape"]) -> Float[Tensor, "probes batch *out_shape"]:
        """`J v`."""

    @abstractmethod
    def vjp(self, u: Float[Tensor, "probes batch *out_shape"]) -> Float[Tensor, "probes batch *in_shape"]:
        """`Jᵀ u`."""

    def gram(
        self, v: Float[Tensor, "probes batch *in_shape"]
    ) -> tuple[Float[Tensor, "probes batch *in_shape"], Float[Tensor, "batch probes probes"]]:
        """`JᵀJ v`, and the inner products `⟨J v_p, J v_q⟩` of every item. Subclasses may know a shorter way."""
        image = self.jvp(v)
        return self.vjp(image), inner(image, image)

    def guess(self) -> Float[Tensor, "batch *in_shape"] | None:
        """Inputs that the maps may stretch most, or nothing. A wrong guess costs a solver a step, never its certificate."""
        return None

    def select(self, items: Tensor) -> "Operator":
        """The maps of some items of the batch. Subclasses that can, do the work of those items only."""
        return Selected(self, items)

    @property
    def noise(self) -> float:
        """The relative size below which products with `JᵀJ` are rounding."""
        return 32 * torch.finfo(self.dtype).eps

    def refined(self) -> "Operator | None":
        """The same maps with more exact products at a higher price, where there is such a thing short of float64."""
        return None

    @property
    def heavy(self) -> bool:
        """Whether products in float64 would cost far more than all the others together."""
        return False

    @property
    def in_size(self) -> int:
        return math.prod(self.in_shape)

    @property
    def out_size(self) -> int:
        return math.prod(self.out_shape)

    def dense(self) -> Float[Tensor, "batch out_size in_size"]:
        """The matrices themselves, from as many products as the smaller side has rows."""
        forward = self.in_size <= self.out_size
        side, shape = (self.in_size, self.in_shape) if forward else (self.out_size, self.out_shape)
        columns = []
        for start in range(0, side, 256):
            count = min(256, side - start)
            probes = torch.zeros(count, self.batch, side, dtype=self.dtype, device=self.device)
            probes[torch.arange(count), :, torch.arange(start, start + count)] = 1.0
            probes = probes.unflatten(2, shape)
            columns.append((self.jvp(probes) if forward else self.vjp(probes)).flatten(2))
        rows = torch.cat(columns).transpose(0, 1)  # (batch, side, other side)
        return rows.mT if forward else rows


def inner(a: Float[Tensor, "probes batch *shape"], b: Float[Tensor, "probes batch *shape"]) -> Tensor:
    """Inner products of the probes of every item, (batch, probes, probes)."""
    return torch.bmm(a.flatten(2).transpose(0, 1), b.flatten(2).transpose(0, 1).mT)


@final
class Selected(Operator):
    """Some items of an operator that cannot be cut: the others get zeros. Each item at most once."""

    def __init__(self, whole: Operator, items: Tensor):
        self._whole, self._items = whole, items
        self.batch = len(items)
        self.in_shape, self.out_shape = whole.in_shape, whole.out_shape
        self.dtype, self.device = whole.dtype, whole.device

    def jvp(self, v):
        return self._whole.jvp(self._scatter(v))[:, self._items]

    def vjp(self, u):
        return self._whole.vjp(self._scatter(u))[:, self._items]

    def select(self, items):
        return Selected(self._whole, self._items[items])

    def _scatter(self, v: Tensor) -> Tensor:
        full = v.new_zeros(v.shape[0], self._whole.batch, *v.shape[2:])
        full[:, self._items] = v
        return full


@final
class Matrix(Operator):
    """Given matrices as an operator on vectors.

    >>> Matrix(torch.eye(3)[None]).jvp(torch.ones(1, 1, 3)).tolist()
    [[[1.0, 1.0, 1.0]]]
    """

    def __init__(self, matrix: Float[Tensor, "batch rows cols"]):
        self.matrix = matrix
        self.batch, rows, cols = matrix.shape
        self.in_shape, self.out_shape = (cols,), (rows,)
        self.dtype, self.device = matrix.dtype, matrix.device

    def jvp(self, v):
        return torch.einsum("bij,pbj->pbi", self.matrix, v)

    def vjp(self, u):
        return torch.einsum("bij,pbi->pbj", self.matrix, u)

    def select(self, items):
        return Matrix(self.matrix[items])
