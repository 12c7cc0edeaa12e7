"""One table of what is known of an operation around the values that enter it: tangent, remainder, change of slope.

`BENT` has an entry for every kind of piece that is not linear, `ROW_RULES` one for every linear operation with constants that
treats tokens as rows, by its aten name. Proofs: docs/explanation/around-blocks.md §2 and §4.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadFunctionError
from howsmooth.maps.scalars import Scalar
from howsmooth.program.pieces import Piece
from howsmooth.spectral import spectral_norm, top_eigenvalue
from howsmooth.theory.upper import FARTHEST, Upper, softmax_range

BEND, TWIST = 2 / math.sqrt(3), 3.0  # of the second and third derivatives of a norm (Lemmas 2.1 and 6.3)
_HIDDEN = 1e-60  # weights that float64 takes for zero are below this wherever no logit moves that far
_UNIT = torch.finfo(torch.float64).eps
_NOTHING = Upper(math.inf)  # is known


class Groups(NamedTuple):
    """Unknown vectors, each of a length that is bounded on its own: which group a column belongs to, and how many there are."""

    of: Tensor
    number: int

    def lengths(self, c: Float[Tensor, "columns entries"]) -> Upper:
        """How far a group of length one moves every entry, (groups, entries)."""
        squares = c.new_zeros(self.number, c.shape[1]).index_add_(0, self.of, c.square())
        return Upper(squares).raised(2 * len(c)).sqrt()

    def entries(self, c: Float[Tensor, "columns *shape"]) -> Upper:
        """How far a group of length one moves every entry, (*shape, groups)."""
        return self.lengths(c.reshape(len(c), -1)).map(lambda t: t.mT.reshape(*c.shape[1:], self.number))

    def rows(self, c: Float[Tensor, "columns *rows d"]) -> Upper:
        """How far a group of length one moves every row, in length, (*rows, groups)."""
        flat = c.flatten(1, -2) if c.ndim > 2 else c[:, None]  # (columns, rows, d)
        sizes = flat.square().sum(-1)
        sizes = sizes.new_zeros(self.number, sizes.shape[1]).index_add_(0, self.of, sizes)  # Frobenius, squared
        several = torch.bincount(self.of, minlength=self.number)
        for g in torch.nonzero(several > 1)[:, 0].tolist():
            block = flat[self.of == g].transpose(0, 1)  # (rows, columns, d)
            gram = block @ block.mT if block.shape[1] <= block.shape[2] else block.mT @ block
            sizes[g] = torch.minimum(sizes[g], top_eigenvalue(gram) + 1e-14 * sizes[g])
        return Upper(sizes).raised(4 * c.shape[-1] + 2 * len(c)).sqrt().map(lambda t: t.mT.reshape(*c.shape[1:-1], self.number))


class Entered(NamedTuple):
    """What enters a node: its value, how far its entries, its rows and all of it can move, as its rule measures that.

    slope: of its derivative by the input. Infinite is what is not known.
    """

    value: Tensor
    entries: Upper
    rows: Upper
    total: Upper
    slope: Upper


class Bend(NamedTuple):
    """A node that is not linear, around the input.

    change: how far its derivative can move.  rest: what it adds beyond first order, in length.  each: that by row or by entry,
    broadcast over its output.  slope: of its derivative by the input.  entries, rows: how far these can move behind it, where
    known.  turn: of a diagonal derivative, the change of every entry.  factors: of a product of different shapes, how far its
    derivative by either factor can move.  between: what is added beyond first order, where that is not centred at zero.
    """

    change: Upper
    rest: Upper
    each: Upper
    slope: Upper
    entries: Upper | None = None
    rows: Upper | None = None
    turn: Upper | None = None
    factors: tuple[Upper, Upper] | None = None
    between: tuple[Tensor, Tensor] | None = None


class Rule(ABC):
    """What is known of an operation that is not linear."""

    by_rows = False  # whether its remainder is bounded row by row, in length
    bounded = True  # whether the change of its derivative is known

    @abstractmethod
    def tangent(self, node: Piece, at: tuple[Tensor, ...], out: Tensor, c: list[Tensor]) -> Tensor:
        """Columns through the derivative."""

    def sizes(
        self, node: Piece, at: tuple[Tensor, ...], out: Tensor, c: list[Tensor], groups: Groups
    ) -> list[tuple[Upper, Tensor]]:
        """What the remainder asks for, each as sizes by group and as signed columns: of entries, or of rows in length."""
        return [(groups.entries(t), t) for t in c]

    @abstractmethod
    def bend(self, node: Piece, entered: list[Entered]) -> Bend:
        """The node around what enters it."""

    def against(self, weight: Tensor, bend: Bend) -> Upper:
        """How far a gradient's product with what the node adds can be from zero."""
        return (bend.each * weight.abs()).map(torch.Tensor.flatten).sum()


class NormRule(Rule):
    """LayerNorm or RMSNorm without its weight."""

    by_rows = True

    def tangent(self, node, at, out, c):
        z, moved = at[0], c[0]
        u, moved = (t - t.mean(-1, keepdim=True) if node.centred else t for t in (z, moved))
        scale = (u.square().mean(-1, keepdim=True) + node.eps).sqrt()
        return moved / scale - out * (out * moved).mean(-1, keepdim=True) / scale

    def sizes(self, node, at, out, c, groups):
        moved = c[0] - c[0].mean(-1, keepdim=True) if node.centred else c[0]
        return [(groups.rows(moved), moved)]

    def bend(self, node, entered):
        z, _, rows, total, slope = entered[0]
        around = NormAround.of(z, node.centred, node.eps, rows.map(lambda t: t.reshape(z.shape[:-1])))
        after = (around.slope * around.moved).min(2 * math.sqrt(z.shape[-1])).map(torch.Tensor.flatten)
        rest = length_of(around.remainder, around.ratios, total)
        steep = around.slope.map(torch.Tensor.flatten).amax()
        return Bend(around.change.map(torch.Tensor.flatten).amax(), rest, around.remainder, slope * steep, rows=after)

    def against(self, weight, bend):
        return (bend.each * Upper(weight.norm(dim=-1)).raised(weight.shape[-1])).map(torch.Tensor.flatten).sum()


class ScalarRule(Rule):
    """A function of one number, entry by entry."""

    def tangent(self, node, at, out, c):
        return _scalar(node).slope(at[0]) * c[0]

    def bend(self, node, entered):
        (z, entries, rows, total, slope), scalar = entered[0], _scalar(node)
        low, high = scalar.remainder(z, entries.value)
        each, turn = Upper(torch.maximum(-low, high)), Upper(scalar.slope_change(z, entries.value))
        steep = Upper(scalar.slope(z).abs()).raised(2**20) + turn
        ratios = tuple(Upper(t) for t in scalar.ratios(z, entries.value))
        steepest = steep.map(torch.Tensor.flatten).amax()
        most, rest = turn.map(torch.Tensor.flatten).amax(), length_of(each, ratios, total)  # pyright: ignore[reportArgumentType]
        after = rows.map(torch.Tensor.flatten) * steepest
        return Bend(most, rest, each, slope * steepest, steep * entries, after, turn, between=(low, high))


class ProductRule(Rule):
    """A product entry by entry, of factors of one shape or of which one is repeated."""

    def tangent(self, node, at, out, c):
        left, right = (t.reshape(len(t), *[1] * (out.ndim + 1 - t.ndim), *t.shape[1:]) for t in c)
        return left * at[1] + at[0] * right

    def bend(self, node, entered):
        a, b = entered
        shared = shared_shape(a.value.shape, b.value.shape)
        # entries meet whole slices of the other factor where it is repeated (Lemma 4.3)
        alpha, beta = (
            slice_lengths(e.entries, shared).min(slice_lengths(e.rows[..., None], (*shared[:-1], 1))) for e in (a, b)
        )
        each = a.entries * b.entries
        total = a.total
        size = each.map(torch.Tensor.flatten).length().min(total.square() * 0.5)
        most = [
            (slice_lengths(Upper(e.value.abs()), shared) + m).map(torch.Tensor.flatten).amax()
            for e, m in ((a, alpha), (b, beta))
        ]
        entries = b.entries * a.value.abs() + a.entries * b.value.abs() + each
        both = (alpha.square() + beta.square()).sqrt().map(torch.Tensor.flatten).amax()
        factors = None
        if a.value.shape != b.value.shape:
            factors = tuple(t.map(torch.Tensor.flatten).amax() for t in (beta, alpha))
        rows = entries.map(lambda t: t.reshape(-1, t.shape[-1] if t.ndim else 1)).length()
        slope = most[1] * a.slope + most[0] * b.slope
        return Bend(both.min(total), size, each, slope, entries, rows, factors=factors)  # pyright: ignore[reportArgumentType]


class SoftmaxRule(Rule):
    """Softmax along an axis."""

    bounded = False

    def tangent(self, node, at, out, c):
        return out * (c[0] - (out * c[0]).sum(node.axis, keepdim=True))

    def sizes(self, node, at, out, c, groups):
        moved = c[0] - (out * c[0]).sum(node.axis, keepdim=True)
        moved = torch.where(at[0] > -math.inf, moved, 0.0)  # hidden keys stay
        return [(groups.entries(moved), moved)]

    def bend(self, node, entered):
        low, high, apart = softmax_remainder(node.run(entered[0].value), entered[0].entries, node.axis)
        none, each = _NOTHING, Upper(torch.maximum(-low, high))
        return Bend(none, none, each, none, entries=apart, between=(low, high))


class MatrixProductRule(Rule):
    """A product of two matrices that both move."""

    bounded = False

    def tangent(self, node, at, out, c):
        return c[0] @ at[1] + at[0] @ c[1]

    def sizes(self, node, at, out, c, groups):
        left, right = c[0], c[1].transpose(-1, -2)
        return [(groups.rows(left), left), (groups.rows(right), right)]

    def bend(self, node, entered):
        (a, b), none = entered, _NOTHING
        return Bend(none, none, a.rows[..., None] * b.rows.map(lambda t: t.unsqueeze(-2)), none)


class MixtureRule(MatrixProductRule):
    """Weights of a softmax times values: the weights are at most one together, and so is what they leave."""

    by_rows = True

    def sizes(self, node, at, out, c, groups):
        return [(groups.entries(c[0]), c[0]), (groups.rows(c[1]), c[1])]

    def bend(self, node, entered):
        (a, b), none = entered, _NOTHING
        return Bend(none, none, (a.entries * b.rows.map(lambda t: t.unsqueeze(-2))).sum(), none)


BENT: dict[str, Rule] = {
    "norm": NormRule(),
    "pointwise": ScalarRule(),
    "product": ProductRule(),
    "softmax": SoftmaxRule(),
    "matrix product": MatrixProductRule(),
}
LINEAR = {"input", "linear", "pick"}
MIXTURE = MixtureRule()


def rule(node: Piece) -> Rule:
    """What is known of a node that is not linear; others are refused."""
    found = BENT.get(node.kind)
    if found is None or (node.kind == "pointwise" and node.scalar is None):
        raise unknown(node)
    return found


def unknown(node: Piece) -> BadFunctionError:
    """What is said of an operation that nothing is known of."""
    return BadFunctionError(
        f"expected attention layers, norms, linear operations, known activations, sums, products and softmax, got {node.name}; "
        'measure a part of the function without it, or a map such as map="attention"'
    )


def _scalar(node: Piece) -> Scalar:
    assert node.scalar is not None
    return node.scalar


def length_of(each: Upper, ratios: tuple[Upper, Upper], total: Upper) -> Upper:
    """The length of remainders of moves whose squares add up to `total²` at most, from bounds on each and on their ratios."""
    whole, linear, square = (t.map(torch.Tensor.flatten) for t in (each, *ratios))
    return whole.length().min(linear.amax() * total).min(square.amax() * total.square())


class RowRule(ABC):
    """What a linear operation with constants does to tokens that are its rows."""

    @abstractmethod
    def knows(self, node: Piece, before: tuple[int, ...]) -> bool:
        """Whether a node is of this kind, by the shape of what enters."""

    @abstractmethod
    def after(self, node: Piece, rows: Upper | None, entries: Upper | None, slope: Upper) -> "Row":
        """How far rows and entries can move behind the node, and the derivative by the input, from those before."""


Row = tuple[Upper | None, Upper | None, Upper]


class MatrixRule(RowRule):
    """A matrix on the right of every token."""

    def knows(self, node, before):
        return isinstance(node.constant, Tensor)

    def after(self, node, rows, entries, slope):
        c = node.constant.double()
        size = Upper(float(spectral_norm(c))).raised(64 * max(c.shape))
        if rows is None:
            return None, None, slope * size
        return rows * size, rows[:, None] * Upper(c.abs()).length(0), slope * size


class ScaledRule(RowRule):
    """A product with constants, entry by entry."""

    def knows(self, node, before):
        return node.constant is not None and before == node.shape

    def after(self, node, rows, entries, slope):
        factor = torch.as_tensor(node.constant, dtype=torch.float64).abs()
        size = float(factor.max())
        entries = None if entries is None else entries.map(lambda t: t.reshape(node.shape)) * factor
        return None if rows is None else rows * size, entries, slope * size


ROW_RULES: dict[str, RowRule] = {"mm": MatrixRule(), "addmm": MatrixRule(), "mul": ScaledRule(), "div": ScaledRule()}
SAME_ROWS = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "clone", "alias", "detach", "expand",
    "_to_copy", "transpose", "permute", "contiguous", "flatten", "add", "sub", "lift_fresh",
}  # fmt: skip


def softmax_remainder(p: Tensor, moved: Upper, axis: int) -> tuple[Tensor, Tensor, Upper]:
    """What `P(S + δ) − P(S) − DP δ` stays between, entry by entry, and how far `P` itself can move (Lemma 2.4).

    moved: bounds `|δ_j|` of logits measured from their mean under `p`, so that `Σ_j P_j δ_j = 0`; zero for hidden keys.
    """
    moved = Upper(moved.value.clamp_max(2 * FARTHEST))
    below, above, apart = softmax_range(p, moved, axis)
    mean, spread = (apart * moved).sum(axis, keepdim=True), (moved.square() * above).sum(axis, keepdim=True)
    high = ((moved + mean).square() * (0.5 * above)).min(moved * p + (above - p).clamp_min(0.0))
    low = (spread * (0.5 * above)).min(moved * p + (p - below).clamp_min(0.0))
    tiny = 8 * _UNIT * p + torch.where(moved.value > 0, _HIDDEN, 0.0)
    return -(low + tiny).value, (high + tiny).value, apart + tiny


@dataclass(frozen=True)
class NormAround:
    """LayerNorm or RMSNorm without its weight, `N`, at tokens that move at most so far.

    scale: `√(mean u² + eps)`, no larger than it is.  d: the width.
    """

    scale: Tensor
    moved: Upper
    d: int
    eps: float

    @classmethod
    def of(cls, z: Tensor, centred: bool, eps: float, moved: Upper) -> "NormAround":
        u, d = (z - z.mean(-1, keepdim=True) if centred else z), z.shape[-1]
        return cls((u.square().mean(-1) + eps).sqrt() * (1 - (2 * d + 16) * _UNIT), moved, d, eps)

    @property
    def floor(self) -> Tensor:
        """The smallest scale of tokens that moved."""
        low = (self.scale - self.moved.value / math.sqrt(self.d)) * (1 - 8 * _UNIT) - 8 * _UNIT * self.scale
        return torch.maximum(low, torch.full_like(low, math.sqrt(self.eps) * (1 - 4 * _UNIT)))

    @property
    def bend(self) -> Upper:
        """A mean of `‖D²N‖` on the way: over `s s'` where the scale falls to `s'` only, over `eps` past the floor."""
        low = self.floor
        above = self.scale - self.moved.value / math.sqrt(self.d) >= math.sqrt(self.eps)
        divisor = torch.where(above, self.scale * low, low.square()) * (1 - 4 * _UNIT)
        return Upper(torch.full_like(low, BEND)) / divisor / (math.sqrt(self.d) * (1 - 4 * _UNIT))

    @property
    def change(self) -> Upper:
        """`‖D_y N − D_x N‖` (Lemma 2.2)."""
        one = Upper(torch.ones_like(self.scale))
        return (self.bend * self.moved).min(one / self.scale + one / self.floor)

    @property
    def slope(self) -> Upper:
        """`‖D_y N‖`."""
        return Upper(torch.ones_like(self.scale)) / self.floor

    @property
    def remainder(self) -> Upper:
        """`|N(y) − N(x) − D_x N (y − x)|` (Lemma 2.2)."""
        return (self.bend * self.moved.square() * 0.5).min(self.moved / self.scale + 2 * math.sqrt(self.d))

    @property
    def ratios(self) -> tuple[Upper, Upper]:
        """The remainder over `|y − x|` and over its square, for all shorter moves too."""
        return self.change, self.bend * 0.5


def shared_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the axes that two factors of a product share, of length one where either is repeated (Lemma 4.3)."""
    return tuple(min(p, q) for p, q in zip(a[::-1], b[::-1], strict=False))[::-1]


def slice_lengths(t: Upper, shared: tuple[int, ...]) -> Upper:
    """Lengths of the slices of a factor, one for each entry of the axes that it shares with the other factor."""
    size = float(t.value.max()) if t.value.numel() else 0.0
    size = size if 0 < size < math.inf else 1.0  # taken out, so that squares stay in range
    squares = (t / size).square()
    return Upper(squares.value.sum_to_size(shared)).raised(t.value.numel()).sqrt() * size
