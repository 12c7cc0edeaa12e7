"""Queries, keys or values of an attention call as a formula of tokens: `turn(norm(x Wᵀ + b))`, read off the graph.

From the call back to the tokens every node that all ways lead through is a place to stop: what is before it is affine in the
tokens, or what is behind it moves entries, normalises or turns them. Each of these is decided by evaluating that stretch: which
entries of a node make which head's query of which token is an index tensor, carried back by labels that are sent through it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.fx import Node

from howsmooth.errors import BadInputError
from howsmooth.maps import LayerNorm, RMSNorm, Rotary
from howsmooth.program.operations import shape, value
from howsmooth.program.replay import Run, Segment, Way
from howsmooth.program.tracing import Flow
from howsmooth.spectral.operator import drawn, stream

FORMULA = 1e-9  # agreement in float64 that only the same formula, evaluated another way, gives
_UNITS = 2**12  # unit vectors sent through an affine stretch at once
_TABLE = 1e-6  # rounding of phases that are kept in float32
_SCALES = (1.0, 1e-3, 1e-6, 1e4)  # of rows at which a norm is compared, so that its eps counts
_TINY = 1e-6  # of rows at which its eps is read
_NONE = 1e-20  # an eps that is none

Norm = LayerNorm | RMSNorm
OnHeads = Callable[[Tensor], Tensor]


def off(ours: Tensor, theirs: Tensor) -> float:
    """How far two tensors are apart, relative to the largest entry; infinite where they are not to be compared."""
    if ours.shape != theirs.shape:
        return math.inf
    error, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
    return 0.0 if error == 0 else error / size if size > 0 and math.isfinite(error) else math.inf


def agree(ours: Tensor, theirs: Tensor, tolerance: float = FORMULA) -> bool:
    """Whether two tensors are the same up to rounding."""
    return off(ours, theirs) <= tolerance


def random_tensor(*size: int, like: Tensor, name: str = "probe") -> Tensor:
    """Normal random numbers in float64, the same each time."""
    return drawn(size, stream(0, name, like.device), torch.float64)


@dataclass(frozen=True, eq=False)
class Stretch(Segment):
    """The function from one node to another, whose entries are told apart."""

    def of_flat(self, t: Tensor) -> Tensor:
        """What the end gives where the start gives `t`, whose shape may be another of as many entries."""
        return self(t.reshape(shape(self.way.enter[0]) or ()))[0]

    @property
    def numel(self) -> int:
        """How many entries the start has."""
        return math.prod(shape(self.way.enter[0]) or ())

    @property
    def real(self) -> bool:
        """Whether both ends are real numbers."""
        return all(isinstance(t := value(n), Tensor) and t.is_floating_point() for n in (*self.way.enter, *self.way.leave))

    def of_entries(self, into: Int[Tensor, "*axes"], out: Int[Tensor, "*others"]) -> Callable[[Tensor], Tensor]:
        """Some entries of the end as a function of some of the start, the others of which are one."""

        def f(z: Tensor) -> Tensor:
            flat = torch.ones(self.numel, dtype=z.dtype, device=z.device)
            return self.of_flat(flat.index_put((into,), z.expand(into.shape))).reshape(-1)[out]

        return f

    def moved(self, like: Tensor) -> Int[Tensor, "*axes"] | None:
        """Where every entry of the end lies in the start, where the stretch does no more than move entries."""
        if not self.real:
            return None
        labels = torch.arange(1, self.numel + 1, dtype=torch.float64, device=like.device)
        marked = self.of_flat(labels)
        if not bool(((marked >= 1) & (marked <= self.numel) & (marked == marked.round())).all()):
            return None
        return marked.long() - 1 if torch.equal(self.of_flat(-labels), -marked) else None


@dataclass(frozen=True, eq=False)
class PartOfRun:
    """A part of a program at one input: what moves with the input, and the values of what does not."""

    flow: Flow
    known: Mapping[Node, Any]

    @classmethod
    def of(cls, flow: Flow, start: Node, end: Node, run: Run, *more: Node) -> "PartOfRun":
        """The part between two nodes; `more` nodes are evaluated with it."""
        return cls(flow, run.values({start, *Way.of(flow, (start,), (end,), check=False).beside, *more}))

    def between(self, start: Node, end: Node) -> Stretch:
        """The stretch from one node to another."""
        return Stretch(Way.of(self.flow, (start,), (end,), check=False), self.known)


def features_last(n: Node, tokens: int) -> Int[Tensor, "tokens features"] | None:
    """The entries of a node by token and feature, the features on the last axis that leaves as many tokens."""
    size = shape(n) or ()
    for axis in reversed(range(len(size))):
        if size[axis] * tokens == math.prod(size):
            return torch.arange(math.prod(size)).reshape(size).movedim(axis, -1).reshape(tokens, size[axis])
    return None


def heads_of(n: Node, like: Tensor) -> Int[Tensor, "heads n d"]:
    """The entries of an operand of attention by head, token and feature."""
    size = value(n).shape
    return torch.arange(math.prod(size), device=like.device).reshape(-1, *size[-2:])


def unmoved(
    part: PartOfRun, waists: Sequence[Node], layout: Int[Tensor, "heads n d"], like: Tensor
) -> tuple[int, Int[Tensor, "kept n d"]]:
    """Back from the last node as far as entries are only moved: which node that is, and the heads' entries there, each once."""
    at = len(waists) - 1
    while at and (index := part.between(waists[at - 1], waists[at]).moved(like)) is not None:
        layout, at = distinct(index.reshape(-1)[layout])[0], at - 1
    return at, layout


def distinct(layout: Int[Tensor, "heads n d"]) -> tuple[Int[Tensor, "kept n d"], int]:
    """The heads that are made of other entries than the one before, and how many in a row share theirs."""
    last = (layout[1:] == layout[:-1]).flatten(1).all(1).tolist()
    group = next((i + 1 for i, same in enumerate(last) if not same), len(layout))
    if len(layout) % group or not torch.equal(layout[::group].repeat_interleave(group, 0), layout):
        return layout, 1
    return layout[::group], group


class UnreadableError(BadInputError):
    """A stretch of the graph is not of the form that is looked for."""


class Affine(NamedTuple):
    """`x ↦ x Wᵀ + b`."""

    weight: Float[Tensor, "out d"]
    bias: Float[Tensor, " out"]

    def repeated(self, heads: int, by: int) -> "Affine":
        """An affine map with every head `by` times."""
        w, b = (t.unflatten(0, (heads, -1)).repeat_interleave(by, 0).flatten(0, 1) for t in self)
        return Affine(w, b)


@dataclass(frozen=True, eq=False)
class SideFormula:
    """Queries, keys or values as a formula of tokens.

    heads: how many differ.  norm: over a head, or over all of them where it is that wide.
    """

    heads: int
    matrix: Affine
    norm: Norm | None = None
    rotary: Rotary | None = None

    def repeated(self, heads: int) -> "SideFormula":
        """A side with each of its heads as often as it takes to have so many."""
        if heads == self.heads:
            return self
        if heads % self.heads or (self.norm is not None and self.norm.width != self.width):
            raise UnreadableError("expected keys and values that as many heads share, got others; measure the layer instead")
        return SideFormula(heads, self.matrix.repeated(self.heads, heads // self.heads), self.norm, self.rotary)

    @property
    def width(self) -> int:
        """The width of a head."""
        return len(self.matrix.bias) // self.heads


@dataclass(frozen=True, eq=False)
class HeadMap:
    """A stretch between two nodes of one shape, as a function of heads, (heads, n, d)."""

    stretch: Stretch
    layout: Int[Tensor, "heads n d"]

    def __call__(self, z: Float[Tensor, "kept n d"]) -> Tensor:
        group = len(self.layout) // len(z)
        return self.stretch.of_entries(self.layout, self.layout)(z.repeat_interleave(group, 0))[::group]


def read_side(part: PartOfRun, enter: Node, operand: Node, tokens: Int[Tensor, "n d"], x: Float[Tensor, "n d"]) -> SideFormula:
    """One operand of an attention call as a formula of what enters; refused where it is none."""
    waists, layout = [enter, *part.flow.after([enter], [operand])], heads_of(operand, x)
    if waists[-1] is not operand or layout.shape[1] != len(x):
        raise UnreadableError("expected queries, keys and values of the same tokens, got others; measure the layer instead")
    stages, at, t = list[HeadMap](), len(waists) - 1, random_tensor(*x.shape, like=x)
    while True:
        at, layout = unmoved(part, waists[: at + 1], layout, x)
        before = [j for j in range(at) if shape(waists[j]) == shape(waists[at])]
        stage = HeadMap(part.between(waists[before[-1]], waists[at]), layout) if before else None
        stage = stage if stage is not None and stage.stretch.real else None
        if stage is None or _affine(stage, random_tensor(*layout.shape, like=x)):  # the last stretch alone takes less
            whole = part.between(enter, waists[at])
            if whole.real and _affine(whole.of_entries(tokens, layout), t):
                break
        if stage is None:
            raise UnreadableError("expected affine, normalised or turned queries and keys, got others; measure it instead")
        stages.insert(0, stage)
        at = before[-1]
    matrix = read_affine(part, enter, waists[at], tokens, layout.transpose(0, 1).flatten(1), x)
    return _behind(len(layout), matrix, stages, len(x))


# what is affine


def _affine(f: Callable[[Tensor], Tensor], t: Float[Tensor, "*heads n d"]) -> bool:
    """Whether a function of tokens looks affine, and the same for every token."""
    zero = f(torch.zeros_like(t))
    return agree(f(-2 * t.flip(-2)) - zero, -2 * (f(t) - zero).flip(-2))


def read_affine(
    part: PartOfRun, start: Node, end: Node, into: Int[Tensor, "n d"], out: Int[Tensor, "n o"], like: Tensor
) -> Affine:
    """The matrix and the bias that a stretch applies to every token, from its derivatives along unit vectors.

    into, out: which entries of the start and of the end are whose.
    """
    f = part.between(start, end).of_entries(into, out)
    (n, d), t = into.shape, random_tensor(*into.shape, like=like)
    bias, answer = f(torch.zeros_like(t))[0], f(t)
    units = torch.eye(d, dtype=t.dtype, device=t.device)
    units = torch.cat([units, units.new_zeros(-d % n, d)]).reshape(-1, n, d)
    along = torch.func.vmap(lambda u: torch.func.jvp(f, (t,), (u,))[1])  # a weight alone comes out to the last bit
    weight = torch.cat([along(u) for u in units.split(max(1, _UNITS // n))]).flatten(0, 1)[:d].mT.contiguous()
    if not agree(t @ weight.mT + bias, answer):
        raise UnreadableError(
            "expected a projection that is affine and the same for every token, got another; measure it instead"
        )
    return Affine(weight, bias)


# what is behind the affine part


def _behind(heads: int, matrix: Affine, stages: Sequence[HeadMap], n: int) -> SideFormula:
    """A side whose affine part and the stages behind it are known: a norm, then factors and phases."""
    z = random_tensor(heads, n, len(matrix.bias) // heads, like=matrix.bias, name="heads")
    for count in range(len(stages), -1, -1):
        before, behind = _composed(stages[:count]), _composed(stages[count:])
        if not _linear(behind, z):
            continue
        norm = _norm(before, z) if count else None
        if count and norm is None:
            continue
        factor, rotary = _turned(behind, z)
        if norm is None:
            w, b = matrix
            by = factor.flatten()
            return SideFormula(heads, matrix if bool((by == 1).all()) else Affine(w * by[:, None], b * by), None, rotary)
        wide = norm.width > z.shape[-1]
        if not wide and not agree(factor, factor[:1].expand_as(factor)):
            continue
        by = factor.flatten() if wide else factor[0]
        bias = None if norm.bias is None else norm.bias * by
        return SideFormula(heads, matrix, type(norm)(norm.weight * by, bias, norm.eps), rotary)
    raise UnreadableError("expected affine, normalised or turned queries and keys, got others; measure the layer instead")


def read_norm(part: PartOfRun, before: Node, after: Node, tokens: Int[Tensor, "n d"], like: Tensor) -> Norm | None:
    """The norm of every token that leads from one node to another of its shape; nothing where that is none."""
    stretch, rows = part.between(before, after), random_tensor(*tokens.shape, like=like, name="rows")
    return norm_of(stretch.of_entries(tokens, tokens), rows) if stretch.real else None


def _composed(stages: Sequence[HeadMap]) -> OnHeads:
    def f(z: Tensor) -> Tensor:
        for stage in stages:
            z = stage(z)
        return z

    return f


def _linear(f: OnHeads, z: Tensor) -> bool:
    return agree(f(-2 * z), -2 * f(z)) and agree(f(z.flip(-1)) + f(z), f(z.flip(-1) + z))


def _norm(f: OnHeads, z: Float[Tensor, "heads n d"]) -> Norm | None:
    """The norm that a function of heads is, of each of them or of all as one."""
    heads, n, _ = z.shape
    found = norm_of(lambda t: f(t.unflatten(0, (heads, n))).flatten(0, 1), z.flatten(0, 1))
    if found is not None or heads == 1:
        return found

    def side_by_side(t: Tensor) -> Tensor:
        return t.transpose(0, 1).flatten(1)

    return norm_of(lambda t: side_by_side(f(t.unflatten(1, (heads, -1)).transpose(0, 1))), side_by_side(z))


def norm_of(f: Callable[[Tensor], Tensor], t: Float[Tensor, "rows d"]) -> Norm | None:
    """The norm of every row that a function is; nothing where it is none.

    Its eps follows from what it makes of tiny rows, its weight and its bias from its answers.
    """
    whole, opposite, tiny, less = (f(c * t) for c in (1.0, -1.0, _TINY, -_TINY))
    odd, bias = (whole - opposite) / 2, (whole + opposite) / 2
    unbiased = float(bias.abs().max()) <= 1e-12 * float(odd.abs().max())
    ratio = (2 * odd.norm(dim=-1) / (tiny - less).norm(dim=-1)).square()  # of (c² m + eps) / (c² m + c² eps)
    for kind in (RMSNorm, LayerNorm):
        size = (t - t.mean(-1, keepdim=True) if kind is LayerNorm else t).square().mean(-1)
        eps = float((_TINY**2 * size * (ratio - 1) / (1 - _TINY**2 * ratio)).mean())
        if eps == math.inf:  # of what is linear
            continue
        short = float(f"{eps:.3g}")  # as it is written
        eps = 0.0 if not eps > _NONE else short if abs(short - eps) <= FORMULA * eps else eps
        w, b = (odd / kind(t.new_ones(t.shape[-1]), eps=eps).value(t))[0], bias[0]
        if not bool(w.isfinite().all() & b.isfinite().all()):
            continue
        found = kind(w, None if unbiased else b, eps)
        if all(agree(found.value(c * t), f(c * t)) for c in _SCALES):
            return found
    return None


def _turned(f: OnHeads, z: Float[Tensor, "heads n d"]) -> tuple[Float[Tensor, "heads d"], Rotary | None]:
    """The factors and phases of a linear function, the phases those relative to the first token's where these are none."""
    value, ones = f(z), f(torch.ones_like(z))
    if agree(ones[:, :1] * z, value):
        factor = ones[:, 0]
        return (torch.ones_like(factor) if agree(factor, torch.ones_like(factor), 1e-12) else factor), None
    for first, second, interleaved in _planes(f, z):
        probe = torch.zeros_like(z)
        probe[..., first] = 1
        of_first = f(probe)
        of_second = f(torch.ones_like(z) - probe)
        cos, sin = of_first[..., first], of_first[..., second]
        factor = torch.ones_like(ones[:, 0])
        rest = [c for c in range(z.shape[-1]) if c not in {*first, *second}]
        factor[:, rest] = ones[:, 0, rest]
        factor[:, first] = torch.hypot(cos[:, 0], sin[:, 0]).copysign(cos[:, 0])
        factor[:, second] = torch.hypot(of_second[:, 0, second], of_second[:, 0, first]).copysign(of_second[:, 0, second])
        factor = torch.where((factor - 1).abs() <= _TABLE, 1.0, factor)
        cos, sin = (t[0] / factor[:1, first] for t in (cos, sin))
        if bool(cos.isfinite().all() & sin.isfinite().all()):
            rotary = Rotary(cos, sin, interleaved)
            if agree(rotary.turn(factor[:, None] * z), value):
                return factor, rotary
    raise UnreadableError("expected rotary phases on the first entries of a head, got others; measure the layer instead")


def _planes(f: OnHeads, z: Tensor) -> Iterator[tuple[list[int], list[int], bool]]:
    """The pairs of entries that phases may turn into each other, from where the first entry goes."""
    probe = torch.zeros_like(z)
    probe[..., 0] = 1
    reach = f(probe).abs().amax((0, 1))
    reach[0] = 0
    partner, even = int(reach.argmax()), z.shape[-1] // 2 * 2
    if 0 < 2 * partner <= even:
        yield list(range(partner)), list(range(partner, 2 * partner)), False
    yield list(range(0, even, 2)), list(range(1, even, 2)), True
