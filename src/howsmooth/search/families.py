"""Tokens that are bad by design: few tokens that all the others, at one place, attend to.

One head builds the tokens, the whole layer is measured. With the head's logits `⟨A x_i + c, x_j⟩`:

    opposite   R(−u, u, …, u)          (γ, u) the real eigenpair of A with the least γ
    half       R(u, u/2, …, u/2)       with the largest
    clusters   k tokens at y, the rest at x, where ⟨A x + c, y − x⟩ is as large as it gets
    tie        k tokens at y, k at y', the rest at x and undecided between them: ⟨A x + c, y − y'⟩ = 0

The first two are those of Castin, Ablin & Peyré 2024, the third is the two-cluster measure of docs/explanation/bounds.md 3.12.
In a tie `L` grows like `√(n/2)·‖A‖R²`, not `√n` (docs/explanation/worst-inputs.md §1).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.kinds.kind import check_softmax
from howsmooth.maps import Attention
from howsmooth.search.sets import Ball, BallAround, Ellipsoid, TokenSet, check_width
from howsmooth.solve import Options, solve, solve_batch
from howsmooth.spectral import Estimate, GolubKahan, Weighted, eig, eigh, spectral_norm, svd
from howsmooth.theory.over_ball.table import check_count

_MEASURED = 4  # candidates, best by their two places, that are measured at full length
_REAL = 1e-9  # an eigenvalue is real if its imaginary part is this small beside the largest one: rounding of a float64 solver
_HEADS = 12  # that build candidates: those whose ‖A‖‖V‖ is largest
_PLACES = 2  # pairs of places kept for each head
_CLIMB, _STEP = 200, 0.25  # steps to places far apart, in units of 1/‖A‖: half of 1/(2‖A‖), safe where |∇²δ| = ‖A + Aᵀ‖
_POWER = 30  # steps of the power iteration for the direction that V stretches most; a good direction is enough
_RANKING, _STEPS = 1e-2, 4  # accuracy of the constants that candidates are ranked by, in so many steps: nearly of rank one
_ANGLES = (20, 40, 60, 75, 85)  # degrees between the two sides of a tie and what decides it


@final
@dataclass(frozen=True, eq=False)
class Configuration:
    """`few` tokens at every place but the last, the others there.

    family: `opposite`, `half`, `clusters` or `tie`.  head: whose matrix built it.  gamma: the eigenvalue, where there is one.
    coordinates: of the places in the set.
    """

    family: str
    head: int
    few: int
    gamma: float | None
    coordinates: Float[Tensor, "places d"]

    def counts(self, n: int) -> list[int]:
        """How many of `n` tokens are at each place; the last takes what is left."""
        counts = [max(0, min(self.few, n - k * self.few)) for k in range(len(self.coordinates) - 1)]
        return [*counts, n - sum(counts)]

    def place(self, n: int) -> Float[Tensor, "n d"]:
        """The coordinates of `n` tokens, the few first."""
        return self.coordinates.repeat_interleave(torch.tensor(self.counts(n), device=self.coordinates.device), 0)

    def __str__(self) -> str:
        gamma = "" if self.gamma is None else f", eigenvalue {self.gamma:.4g}"
        few = " and ".join([str(self.few)] * (len(self.coordinates) - 1))
        return f"{self.family}: {few} against the rest (head {self.head}{gamma})"

    __repr__ = __str__


@final
@dataclass(frozen=True, eq=False, repr=False)
class Configured:
    """The worst configuration of `n` tokens: what it is, the tokens, and the constant of the layer there."""

    n: int
    reach: float
    configuration: Configuration
    tokens: Float[Tensor, "n d"]
    estimate: Estimate

    def to_dict(self) -> dict[str, Any]:
        built = {name: getattr(self.configuration, name) for name in ("family", "head", "few", "gamma")}
        return {"n": self.n, "radius": self.reach, **built, **self.estimate.to_dict()}

    def __repr__(self) -> str:
        return f"{self.configuration!r}: L = {self.estimate!r}"


@torch.no_grad()
def configurations(attn: Attention, n: int, within: TokenSet | float, *, head: int | None = None) -> list[Configuration]:
    """The candidates for `n` tokens, from one head or from the twelve whose `‖A‖‖V‖` is largest.

    within: a radius, `Ball` or `Ellipsoid`.  On an ellipsoid the middle of a ball is not there, so `half` is left out.

    >>> attn = Attention.from_matrices(-torch.eye(2), torch.eye(2))
    >>> sorted({c.family for c in configurations(attn, 4, 1.0)})
    ['clusters', 'half', 'opposite', 'tie']
    """
    space, counts, candidates = _space(attn, n, within), _counts(n), []
    attn = attn.to("cpu")  # where a GPU would wait for one small decomposition after the other
    room_for_ties = n > 2 and attn.width > (2 if isinstance(space, Ellipsoid) else 1)
    for one in sorted(_heads(attn, head), key=lambda one: -one.size)[:_HEADS]:
        candidates += _eigenvector_families(one, space)
        for places in _far_apart(one, space):
            candidates += [Configuration("clusters", one.index, few, None, places) for few in counts]
            for tie in _ties(one, places[1], space) if room_for_ties else []:
                candidates += [Configuration("tie", one.index, few, None, tie) for few in counts if 2 * few < n and few <= 4]
    return candidates


@torch.no_grad()
def worst_configuration(
    attn: Attention, n: int, within: TokenSet | float, *, head: int | None = None, certify: float | None = None, seed: int = 0
) -> Configured:
    """The candidate with the largest `L`, measured at its full length.

    Candidates are ranked by their places as a measure with two or three atoms, which is exact without a mask up to splitting
    (docs/explanation/worst-inputs.md §1), and the best few are measured.

    >>> attn = Attention.from_matrices(-torch.eye(1), torch.eye(1))
    >>> round(worst_configuration(attn, 16, 2.0).estimate.value, 3)
    4.01
    """
    space = _space(attn, n, within)
    order = ranked(attn, n, space, head=head)
    x = space.tokens(torch.stack([c.place(n) for c in order[:_MEASURED]]))
    x = x.to(attn.device, torch.promote_types(attn.dtype, torch.float32))
    estimates = solve_batch(attn, x, Options(seed=seed))[0]
    best = max(range(len(estimates)), key=lambda i: estimates[i].value)
    estimate = estimates[best] if certify is None else solve(attn, x[best], Options(seed=seed, certify=certify))[0]
    return Configured(n, space.reach, order[best], x[best], estimate)


@torch.no_grad()
def ranked(attn: Attention, n: int, within: TokenSet | float, *, head: int | None = None) -> list[Configuration]:
    """All candidates, the worst first, by the measure `Σ (count/n) δ_place` without the mask.

    Tokens that coincide act as one of their joint weight: logits get the logarithms of the counts, and the Jacobian is
    `D^{½} J D^{−½}` (docs/explanation/worst-inputs.md §1). Two or three tokens stand for `n`.
    """
    space = _space(attn, n, within)
    layer = replace(attn, causal=False, window=None, bias=None)
    dtype = torch.promote_types(attn.dtype, torch.float32)
    groups: dict[tuple[int, ...], list[Configuration]] = {}
    for c in configurations(attn, n, space, head=head):
        groups.setdefault(tuple(c.counts(n)), []).append(c)
    scored: list[tuple[float, Configuration]] = []
    for counts, group in groups.items():
        here = [i for i, count in enumerate(counts) if count]
        weights = torch.tensor([counts[i] for i in here], dtype=dtype, device=attn.device)
        x = space.tokens(torch.stack([c.coordinates[here] for c in group])).to(weights)
        root = weights.sqrt()[None, :, None]
        operator = Weighted(replace(layer, bias=weights.log()[None, None, None]).linearize(x)[1], root, 1 / root)
        solutions = GolubKahan(max_steps=_STEPS).solve(operator, _RANKING, None, [0] * operator.batch)
        scored += [(s.value if math.isfinite(s.value) else 0.0, c) for s, c in zip(solutions, group, strict=True)]
    return [c for _, c in sorted(scored, key=lambda pair: -pair[0])]


@torch.no_grad()
def eigenvector_configuration(attn: Attention, within: TokenSet | float, *, head: int = 0) -> Configuration | None:
    """The paper's choice for a head: `half` if the largest real eigenvalue is above −8 times the least, else `opposite`.

    Nothing where the head's `A` has no real eigenvalue.

    >>> eigenvector_configuration(Attention.from_matrices(torch.diag(torch.tensor([2.0, -1.0])), torch.eye(2)), 1.0)
    opposite: 1 against the rest (head 0, eigenvalue -1)
    """
    space = _space(attn, 2, within)
    families = {c.family: c for c in _eigenvector_families(_heads(attn, head)[0], space)}
    opposite, half = families.get("opposite"), families.get("half")
    if opposite is None or half is None or opposite.gamma is None or half.gamma is None:
        return opposite
    return half if half.gamma > -8 * opposite.gamma else opposite


def _space(attn: Attention, n: int, within: TokenSet | float) -> TokenSet:
    check_layer(attn, n)
    check_softmax(attn.kind, "configurations")
    space = within if isinstance(within, TokenSet) else Ball(within)
    if isinstance(space, BallAround):
        raise BadInputError("expected a Ball or an Ellipsoid, got the neighbourhood of an input; configurations need room")
    if isinstance(space, Ellipsoid):
        check_width(attn.width, space.norm.width)
    return space


def check_layer(attn: Attention, n: int | None) -> None:
    """Refuse what is no layer on `n` tokens."""
    if not isinstance(attn, Attention):
        raise BadInputError(f"expected an Attention layer, got {type(attn).__name__}; configurations need its weights")
    check_count(n)
    if attn.attention_mask is not None:
        raise BadInputError("expected a layer without padding, got an attention_mask; count real tokens only and leave it out")
    if attn.bias is not None and (attn.bias.shape[0] != 1 or attn.bias.shape[3] != n or attn.bias.shape[2] not in (1, n)):
        raise BadInputError(f"expected a bias for one sequence of {n} tokens, got {tuple(attn.bias.shape)}; give n its length")


@final
@dataclass(frozen=True, eq=False)
class _HeadMatrix:
    """`τ W_q` and `W_k` of a head, (width, d), `c = τ W_kᵀ b_q`, and `W_v`, `W_o`, float64: `A = W_kᵀ (τ W_q)`."""

    index: int
    q: Float[Tensor, "r d"]
    k: Float[Tensor, "r d"]
    shift: Float[Tensor, " d"]
    v: Float[Tensor, "s d"]
    o: Float[Tensor, "d_out s"]

    @cached_property
    def _matrix(self) -> Tensor | None:
        """`A` itself where it is no larger than its factors."""
        return self.k.mT @ self.q if len(self.q) >= self.q.shape[1] else None

    @property
    def size(self) -> float:
        """`‖A‖‖V‖` in Frobenius norm."""
        squares = [((a @ a.mT) * (b @ b.mT)).sum() for a, b in ((self.k, self.q), (self.o.mT, self.v))]
        return float((squares[0] * squares[1]).sqrt())

    def within(self, basis: Float[Tensor, "d p"]) -> "_HeadMatrix":
        """A head on tokens of the form `basis z`, as far as logits go."""
        return replace(self, q=self.q @ basis, k=self.k @ basis, shift=self.shift @ basis)

    def logits(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
        """`A x + c`."""
        return (x @ self._matrix.mT if self._matrix is not None else (x @ self.q.mT) @ self.k) + self.shift

    def pull(self, g: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
        """`Aᵀ g`."""
        return g @ self._matrix if self._matrix is not None else (g @ self.k.mT) @ self.q


def _heads(attn: Attention, head: int | None) -> list[_HeadMatrix]:
    """One head, or all of them."""
    if head is not None and (not isinstance(head, int) or not 0 <= head < attn.heads):
        raise BadInputError(f"expected a head between 0 and {attn.heads - 1}, got {head!r}; heads are counted from 0")
    w = attn.by_head()
    chosen = range(attn.heads) if head is None else [head]
    return [_HeadMatrix(h, attn.scale * w.q[h], w.k[h], attn.scale * (w.k[h].mT @ w.b_q[h]), w.v[h], w.o[h]) for h in chosen]


def _eigenvector_families(head: _HeadMatrix, space: TokenSet) -> list[Configuration]:
    """`opposite` and `half`; nothing where `A` has no real eigenvalue.

    Eigenvectors of `A = W_kᵀ τW_q` are `W_kᵀ` times those of `τW_q W_kᵀ`.
    """
    values, vectors = eig(head.q @ head.k.mT)
    real = values.imag.abs() <= _REAL * values.abs().max()
    gamma, u = values.real[real], head.k.mT @ vectors.real[:, real]
    length = u.norm(dim=0)
    gamma, u = gamma[length > 0], (u / length)[:, length > 0]
    if len(gamma) == 0:
        return []
    low, high = int(gamma.argmin()), int(gamma.argmax())
    far = _furthest(space, torch.stack([-u[:, low], u[:, low], u[:, high]]))
    families = [Configuration("opposite", head.index, 1, float(gamma[low]), far[:2])]
    if isinstance(space, Ball):
        families.append(Configuration("half", head.index, 1, float(gamma[high]), torch.stack([far[2], far[2] / 2])))
    return families


def _far_apart(head: _HeadMatrix, space: TokenSet) -> list[Float[Tensor, "2 d"]]:
    """Places `y` (few) and `x` (rest) where `δ = ⟨A x + c, y − x⟩` is large: `y` the furthest along `A x + c`, `x` climbs.

    In a ball none of it leaves the span of the rows of `W_q` and `W_k`, whose coordinates are few.
    """
    q, k = head.q, head.k
    if isinstance(space, Ball) and 2 * len(q) < q.shape[1]:
        basis = torch.linalg.qr(torch.cat([k, q]).mT)[0]
        return [space.project(places @ basis.mT) for places in _far_apart(head.within(basis), space)]
    directions = torch.cat([svd(q @ k.mT)[2][:2], eigh((q @ k.mT + k @ q.mT) / 2)[1].mT[[0, -1]]]) @ k
    directions = directions / directions.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    z = torch.cat([_furthest(space, sign * directions) for sign in (1.0, -1.0)])
    z = torch.cat([z, 0.5 * z]) if isinstance(space, Ball) else z
    triangles = [torch.linalg.qr(w.mT, mode="r")[1] for w in (k, q)]
    a = float(spectral_norm(triangles[0] @ triangles[1].mT))
    if a == 0:
        return [torch.stack([z[0], z[len(directions)]])]
    for _ in range(_CLIMB):
        x = space.tokens(z)
        y = space.tokens(_furthest(space, head.logits(x)))
        slope = head.pull(y - x) - head.logits(x)  # of δ in x, `y` frozen
        slope = slope * (space.norm.weight.to(z) if isinstance(space, Ellipsoid) else 1.0)
        z = space.project(z + _STEP / a * slope)
    x = space.tokens(z)
    far = _furthest(space, head.logits(x))
    gap = (head.logits(x) * (space.tokens(far) - x)).sum(-1)
    kept: list[int] = []
    for i in gap.argsort(descending=True).tolist():
        apart = all(float((z[i] - z[j]).norm()) > 1e-3 * space.size for j in kept)
        kept += [i] if apart and len(kept) < _PLACES else []
    return [torch.stack([far[i], z[i]]) for i in kept]


def _ties(head: _HeadMatrix, rest: Float[Tensor, " d"], space: TokenSet) -> list[Float[Tensor, "3 d"]]:
    """Places `y, y'` symmetric about `g = A x + c`, at several angles to it, and the rest at `x`.

    They lie apart along the `p ⟂ g` that `V = W_o W_v` stretches most.
    """
    v = torch.linalg.qr(head.o, mode="r")[1] @ head.v  # stretches every vector as V does
    g = head.logits(space.tokens(rest[None]))[0]
    g = g / g.norm().clamp_min(torch.finfo(g.dtype).tiny)
    p = torch.linspace(1, 2, len(g), dtype=g.dtype, device=g.device)
    for _ in range(_POWER):
        p = v.mT @ (v @ p)
        p = p - g * (g @ p)
        p = p / p.norm().clamp_min(torch.finfo(p.dtype).tiny)
    angles = [math.radians(degrees) for degrees in _ANGLES]
    sides = [torch.stack([math.cos(t) * g + math.sin(t) * p, math.cos(t) * g - math.sin(t) * p]) for t in angles]
    return [torch.cat([_furthest(space, side), rest[None]]) for side in sides]


def _furthest(space: TokenSet, direction: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
    """Coordinates of the token that is furthest along each direction."""
    if isinstance(space, Ellipsoid):
        return space.project(space.norm.weight.to(direction) * direction)
    length, first = direction.norm(dim=-1, keepdim=True), torch.eye(1, direction.shape[-1]).to(direction)
    unit = torch.where(length > 0, direction / length.clamp_min(torch.finfo(direction.dtype).tiny), first)
    return space.project(2 * space.size * unit)


def _counts(n: int) -> list[int]:
    """Sizes of the small cluster: 1, 2, 3, 4, 8, … up to half of the tokens, and their complements where n is small."""
    few = {k for k in {3} | {2**k for k in range(n.bit_length())} if k <= max(1, n // 2)}
    return sorted(few | ({n - k for k in few} if n <= 16 else set()))
