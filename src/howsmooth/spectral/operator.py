"""What a Jacobian is to a solver: two products, for several probes and several inputs at once."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.tensors import float32_products


class Rounding(NamedTuple):
    """What is proved of the arithmetic of all items of a batch (docs/explanation/theory.md, Proposition 2.6).

    Weights, means and slopes are computed once, so products are those of a fixed map `J̃` beside `J`, up to rounding.

    size: bounds `|J|` and `|J̃|`.  error: how far a computed product with a unit vector is off that of `J̃`, either way.
    fixed: `|J̃ − J|`.  moved: how far a row of the map's value is off, which is the point of the next map.
    """

    size: float
    error: float
    fixed: float
    moved: float = math.inf


class Rounded(NamedTuple):
    """A vector as it was computed, and what rounding has done to it at most (docs/explanation/theory.md, Proposition 2.7).

    off: how far each row is off the exact one.  moved: how far a row of the point is off that the next map is linearised at.
    None where nothing is proved.
    """

    vector: Float[Tensor, "probes batch *shape"]
    off: Float[Tensor, "probes batch *rows"] | None
    moved: Float[Tensor, " batch"] | None

    @classmethod
    def exact(cls, v: Float[Tensor, "probes batch *shape"]) -> "Rounded":
        """A vector that is what it is, at a point that is given."""
        return cls(v, v.new_zeros(v.shape[:-1], dtype=torch.float64), v.new_zeros(v.shape[1], dtype=torch.float64))


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

    def guess(self, seeds: Sequence[int]) -> Float[Tensor, "batch *in_shape"] | None:
        """Inputs that the maps may stretch most, or nothing. A wrong guess costs a solver a step, never its certificate.

        seeds: of every item; what is drawn comes from `stream(seed, "guess")`, apart from a solver's own draws.
        """
        return None

    def rounding(self, moved: float = 0.0) -> Rounding | None:
        """What is proved of the rounding of all products, or nothing.  moved: how far a row of the point is off."""
        return None

    def rounded(self, v: Rounded) -> Rounded:
        """`J v` with what is proved of its rounding, which for one vector is quick to know and less than for all."""
        return Rounded(self.jvp(v.vector), None, None)

    def select(self, items: Tensor) -> "Operator":
        """The maps of some items of the batch. Subclasses that can, do the work of those items only."""
        return Selected(self, items)

    @property
    def noise(self) -> float:
        """The relative size below which products with `JᵀJ` are rounding."""
        return 32 * torch.finfo(self.dtype).eps

    def refined(self) -> "Operator | None":
        """Operators of these maps with more exact products at a higher price, where there is such a thing short of float64."""
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

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({self.batch} of {self.out_size} × {self.in_size}, {dtype})"

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


def stream(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """Random numbers of a run. Each thing that is drawn has a name and a stream of its own, independent of the others."""
    mark = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(mark, "big") >> 1)


def drawn(shape: Sequence[int], random: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers, made where the stream lives: bringing many from the host takes longer than a product."""
    return torch.randn(shape, generator=random, device=random.device, dtype=dtype)


def unit_rows(v: Float[Tensor, "*rows N"]) -> Float[Tensor, "*rows N"]:
    """Rows of length one; zero stays zero."""
    length = v.norm(dim=-1, keepdim=True)
    return v / torch.where(length > 0, length, 1.0)


def inner(a: Float[Tensor, "probes batch *shape"], b: Float[Tensor, "probes batch *shape"]) -> Tensor:
    """Inner products of the probes of every item, (batch, probes, probes)."""
    if len(a) == len(b) == 1 and a.device.type != "cpu":  # the batched product is many times as slow there
        return torch.linalg.vecdot(a.flatten(2), b.flatten(2)).mT[..., None]
    with float32_products():
        return torch.bmm(a.flatten(2).transpose(0, 1), b.flatten(2).transpose(0, 1).mT)


class WrappedOperator(Operator):
    """An operator made of another one: its batch, precision, device and rounding noise are that one's."""

    def __init__(self, operator: Operator):
        self.operator = operator
        self.batch, self.in_shape, self.out_shape = operator.batch, operator.in_shape, operator.out_shape
        self.dtype, self.device = operator.dtype, operator.device

    @abstractmethod
    def around(self, operator: Operator) -> Operator:
        """A new one, made of another operator for the same maps."""

    @property
    def noise(self) -> float:
        return self.operator.noise

    @property
    def heavy(self) -> bool:
        return self.operator.heavy

    def refined(self):
        operator = self.operator.refined()
        return None if operator is None else self.around(operator)

    def rounding(self, moved=0.0):
        return self.operator.rounding(moved)


@final
class Selected(WrappedOperator):
    """Some items of an operator that cannot be cut: the others get zeros. Each item at most once."""

    def __init__(self, operator: Operator, items: Tensor):
        super().__init__(operator)
        self._items, self.batch = items, len(items)

    def around(self, operator):
        return Selected(operator, self._items)

    def jvp(self, v):
        return self.operator.jvp(self._scatter(v))[:, self._items]

    def vjp(self, u):
        return self.operator.vjp(self._scatter(u))[:, self._items]

    def select(self, items):
        return Selected(self.operator, self._items[items])

    def _scatter(self, v: Tensor) -> Tensor:
        full = v.new_zeros(v.shape[0], self.operator.batch, *v.shape[2:])
        full[:, self._items] = v
        return full


@final
class Composed(Operator):
    """`outer ∘ inner`: the chain rule."""

    def __init__(self, outer: Operator, inner: Operator):
        if outer.in_shape != inner.out_shape or outer.batch != inner.batch:
            raise BadInputError(
                f"expected an outer map that takes {inner.batch} × {inner.out_shape}, got one that takes "
                f"{outer.batch} × {outer.in_shape}; compose maps whose widths agree"
            )
        self.outer, self.inner = outer, inner
        self.batch, self.in_shape, self.out_shape = inner.batch, inner.in_shape, outer.out_shape
        self.dtype, self.device = inner.dtype, inner.device

    @property
    def noise(self) -> float:
        return max(self.outer.noise, self.inner.noise)

    @property
    def heavy(self) -> bool:
        return self.outer.heavy or self.inner.heavy

    def refined(self):
        outer, inner = self.outer.refined(), self.inner.refined()
        return None if outer is None and inner is None else Composed(outer or self.outer, inner or self.inner)

    def jvp(self, v):
        return self.outer.jvp(self.inner.jvp(v))

    def vjp(self, u):
        return self.inner.vjp(self.outer.vjp(u))

    def gram(self, v):
        w, energy = self.outer.gram(self.inner.jvp(v))
        return self.inner.vjp(w), energy

    def guess(self, seeds):
        outer = self.outer.guess(seeds)
        return None if outer is None else self.inner.vjp(outer[None])[0]

    def rounding(self, moved=0.0):
        inner = self.inner.rounding(moved)
        outer = None if inner is None else self.outer.rounding(inner.moved)
        if outer is None or inner is None:
            return None
        error = outer.size * inner.error + outer.error * inner.size + outer.error * inner.error
        return Rounding(outer.size * inner.size, error, outer.size * inner.fixed + outer.fixed * inner.size, outer.moved)

    def rounded(self, v):
        return self.outer.rounded(self.inner.rounded(v))

    def select(self, items):
        return Composed(self.outer.select(items), self.inner.select(items))


@final
class Weighted(WrappedOperator):
    """`diag(rows) · J · diag(cols)`: weights on the output and on the input, broadcast over (batch, …).

    A measure `Σ a_i δ_{x_i}` sees the Jacobian as `D^{½} J D^{−½}` with `D = diag(a)`.
    """

    def __init__(self, operator: Operator, rows: Float[Tensor, "..."], cols: Float[Tensor, "..."]):
        super().__init__(operator)
        try:
            self._rows = rows.expand(self.batch, *self.out_shape)
            self._cols = cols.expand(self.batch, *self.in_shape)
        except RuntimeError:
            raise BadInputError(
                f"expected row weights that broadcast to {(self.batch, *self.out_shape)} and column weights to "
                f"{(self.batch, *self.in_shape)}, got {tuple(rows.shape)} and {tuple(cols.shape)}; "
                "give one weight per token or per entry"
            ) from None

    def around(self, operator):
        return Weighted(operator, self._rows, self._cols)

    def jvp(self, v):
        return self._rows * self.operator.jvp(self._cols * v)

    def vjp(self, u):
        return self._cols * self.operator.vjp(self._rows * u)

    def rounding(self, moved=0.0):
        own = self.operator.rounding(moved)
        if own is None:
            return None
        gain = float(self._rows.abs().max()) * float(self._cols.abs().max())
        error = own.error + 2 * torch.finfo(self.dtype).eps * (own.size + own.error)
        return Rounding(gain * own.size, gain * error, gain * own.fixed, own.moved)

    def rounded(self, v):
        units = 4 * torch.finfo(self.dtype).eps  # of a weight and of a product with it

        def weighted(t: Rounded, weights: Tensor) -> Rounded:
            vector = weights * t.vector
            off = None if t.off is None else (1 + units) * weights.abs().amax(-1) * t.off + units * vector.double().norm(dim=-1)
            return t._replace(vector=vector, off=off)

        return weighted(self.operator.rounded(weighted(v, self._cols)), self._rows)

    def guess(self, seeds):
        """The operator's own, weighted: exact too where the operator has rank one."""
        guess = self.operator.guess(seeds)
        return None if guess is None else self._cols * guess

    def select(self, items):
        return Weighted(self.operator.select(items), self._rows[items], self._cols[items])


@final
class Restricted(WrappedOperator):
    """`J` for perturbations of some tokens alone, the others held fixed: its columns there, from `(tokens, …)`.

    Its own inputs are those tokens, so a random start is uniform among the perturbations that are allowed.
    """

    def __init__(self, operator: Operator, tokens: Sequence[int] | Tensor):
        super().__init__(operator)
        self.tokens = torch.as_tensor(tokens, device=operator.device)
        self.in_shape = (len(tokens), *operator.in_shape[1:])

    def around(self, operator):
        return Restricted(operator, self.tokens)

    def spread(self, v: Float[Tensor, "*axes tokens d"]) -> Float[Tensor, "*axes n d"]:
        """A perturbation of all tokens: zero where they are held."""
        axis = v.ndim - len(self.in_shape)
        full = v.new_zeros(*v.shape[:axis], *self.operator.in_shape)
        return full.index_copy_(axis, self.tokens.to(v.device), v)

    def _gather(self, v: Tensor) -> Tensor:
        return v.index_select(2, self.tokens)

    def jvp(self, v):
        return self.operator.jvp(self.spread(v))

    def vjp(self, u):
        return self._gather(self.operator.vjp(u))

    def rounded(self, v):
        off = v.off
        if off is not None:
            off = off.new_zeros(*off.shape[:-1], self.operator.in_shape[0]).index_copy_(-1, self.tokens, off)
        return self.operator.rounded(Rounded(self.spread(v.vector), off, v.moved))

    def gram(self, v):
        product, energy = self.operator.gram(self.spread(v))
        return self._gather(product), energy

    def guess(self, seeds):
        guess = self.operator.guess(seeds)
        return None if guess is None else guess.index_select(1, self.tokens)

    def select(self, items):
        return Restricted(self.operator.select(items), self.tokens)
