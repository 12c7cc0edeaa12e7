"""Probability measures: with finitely many atoms, what attention sees when tokens carry mass, and Gaussian."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from howsmooth.errors import BadInputError
from howsmooth.kernels.tensors import Place, check_dense, check_tensor, described, place
from howsmooth.settings import flag, items, number, seed_of, whole
from howsmooth.spectral import eigh

_PARTS = 1_000_000  # of one atom
_NUMBERS = 2**28  # drawn at once


@final
@dataclass(frozen=True, eq=False)
class Measure:
    """`μ = Σ_i a_i δ_{x_i}`, or on positions and points, `Σ_i a_i δ_{(s_i, x_i)}` (docs/explanation/meanfield.md §5.1).

    Attributes:
        points: (m, d), one atom per row.
        weights: (m,), positive, summing to one; equal if left out; kept in float64.
        positions: (m,) in [0, 1], for masked attention, which lets an atom see those at its own position and before.

    Atoms without mass are dropped, atoms with positions are put in their order. `lipschitz(attn, mu)` is the constant of these
    atoms as they are. Where they sample a density it tends, as they get denser, to the norm of the derivative on all fields, an
    upper bound on what W₂ sees of the density itself (Theorem 5.5).

    >>> mu = Measure(torch.tensor([[0.0], [1.0], [1.0]]), torch.tensor([0.5, 0.25, 0.25]))
    >>> len(mu), len(mu.merge())
    (3, 2)
    """

    points: Float[Tensor, "m d"]
    weights: Float[Tensor, " m"] | None = None
    positions: Float[Tensor, " m"] | None = None

    def __post_init__(self):
        points, weights, positions = self.points, self.weights, self.positions
        check_tensor(points, "points", ("atoms", "d"), "give one atom per row")
        m, device = len(points), points.device
        mass = torch.full((m,), 1 / m, dtype=torch.float64, device=device) if weights is None else _mass(weights, m, device)
        keep = torch.nonzero(mass > 0)[:, 0]
        if positions is not None:
            positions = _check_positions(positions, m, device)
            keep = keep[positions[keep].argsort(stable=True)]
        if len(keep) < m or positions is not None:
            points, mass = points[keep], mass[keep]
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "weights", mass)
        object.__setattr__(self, "positions", None if positions is None else positions[keep])

    @classmethod
    def from_tokens(cls, tokens: Float[Tensor, "n d"], causal: bool = False) -> "Measure":
        """A sequence as a measure: equal masses and, for masked attention, positions `1/n, 2/n, …, 1`.

        >>> Measure.from_tokens(torch.zeros(4, 2), causal=True).positions.tolist()
        [0.25, 0.5, 0.75, 1.0]
        """
        check_tensor(tokens, "tokens", ("n", "d"), "tokens are rows")
        n, causal = len(tokens), flag(causal, "causal")
        return cls(tokens, None, torch.arange(1, n + 1, dtype=torch.float64, device=tokens.device) / n if causal else None)

    @classmethod
    def from_density(
        cls, density: Callable[[Float[Tensor, "m d"]], Float[Tensor, " m"]], axes: Sequence[Float[Tensor, " k"]]
    ) -> "Measure":
        """A density on the grid that the axes span, up to a factor: mass = density × volume of the grid cell, normalised.

        The result has atoms; what its constants say of the density is in docs/explanation/meanfield.md, after Theorem 5.5.
        axes: increasing coordinates, one tensor per dimension, of two or more numbers each.

        >>> flat = Measure.from_density(lambda x: torch.ones(len(x)), [torch.linspace(0, 1, 3)])
        >>> flat.weights.tolist()  # the cells at the ends are half as wide
        [0.25, 0.5, 0.25]
        """
        fix = "use torch.linspace"
        axes = list(axes) if isinstance(axes, list | tuple) else items(axes, "a list of axes, one tensor each", fix)
        for t in axes:
            check_tensor(t, "an axis", ("k",), fix)
        if not axes or not all(len(t) >= 2 and bool((t.diff() > 0).all()) for t in axes):
            got = [len(t) for t in axes]
            raise BadInputError(f"expected axes that increase, two numbers or more each, got axes of {got}; {fix}")
        steps = [t.double().diff() for t in axes]
        widths = [(pad(step, (0, 1)) + pad(step, (1, 0))) / 2 for step in steps]
        points = torch.stack([t.flatten() for t in torch.meshgrid(*axes, indexing="ij")], -1)
        volume = math.prod(torch.meshgrid(*widths, indexing="ij"), start=torch.ones(())).flatten()
        if not callable(density):
            raise BadInputError(f"expected the density as a function of points, got {type(density).__name__}; pass a callable")
        values = density(points)
        check_dense(values, "the density")
        if not isinstance(values, Tensor) or values.is_complex() or values.shape != (len(points),):
            raise BadInputError(
                f"expected one density per grid point, ({len(points)},), got {described(values)}; reduce over the last axis"
            )
        mass = values.detach().double() * volume.to(values.device)
        total = float(mass.sum())
        if not (bool((mass >= 0).all()) and 0 < total < math.inf):
            raise BadInputError(
                f"expected a density that is finite, not negative, and positive somewhere on the grid, got total {total:g} and "
                f"least value {float(values.min()):g}; check the density or widen the grid"
            )
        return cls(points, mass / total)

    @property
    def mass(self) -> Float[Tensor, " m"]:
        """The weights, (m,) float64."""
        assert self.weights is not None
        return self.weights

    @property
    def width(self) -> int:
        """The dimension d of the points."""
        return self.points.shape[1]

    @property
    def mean(self) -> Float[Tensor, " d"]:
        """`∫ x dμ`, float64."""
        return self.mass @ self.points.double()

    @property
    def radius(self) -> float:
        """The length of the longest point."""
        return float(self.points.double().norm(dim=-1).max())

    def __len__(self) -> int:
        return len(self.points)

    def ends(self) -> Int[Tensor, " m"]:
        """How many atoms each atom sees under a mask: those at its position or before."""
        if self.positions is None:
            raise BadInputError(
                "expected a measure with positions for masked attention, got one without; "
                "pass positions=, or Measure.from_tokens(x, causal=True)"
            )
        return torch.searchsorted(self.positions, self.positions, right=True).cpu()

    def moved(self, points: Float[Tensor, "m k"]) -> "Measure":
        """A measure with these masses and positions at other points."""
        check_tensor(points, "points", (len(self), "k"), "move every atom")
        return Measure(points, self.weights, self.positions)

    def to(self, device: Place = None, dtype: torch.dtype | None = None) -> "Measure":
        """The points in another precision, everything on another device, named as for a tensor."""
        device, dtype = place(device, dtype)
        positions = None if self.positions is None else self.positions.to(device)
        return replace(self, points=self.points.to(device, dtype), weights=self.mass.to(device), positions=positions)

    def split(self, atom: int | None = None, parts: int = 2) -> "Measure":
        """One atom, or every one, cut into equal parts that stay where they are: the same measure, written longer."""
        most = f"a whole number of parts from 1 to {_PARTS:,}"
        parts = whole(parts, most, "2 halves an atom", least=1, below=_PARTS + 1)
        if atom is not None:
            expected = f"an atom from 0 to {len(self) - 1}"
            atom = whole(atom, expected, "leave it out to split them all", below=len(self))
        counts = torch.ones(len(self), dtype=torch.long, device=self.points.device)
        counts[slice(None) if atom is None else atom] = parts
        index = torch.repeat_interleave(torch.arange(len(self), device=counts.device), counts)
        positions = None if self.positions is None else self.positions[index]
        return Measure(self.points[index], (self.mass / counts)[index], positions)

    def merge(self, tol: float = 0.0) -> "Measure":
        """Atoms at one position whose points are equal, or joined by steps of at most `tol`, put together at their centre.

        >>> Measure(torch.tensor([[0.0], [1e-9], [1.0]])).merge(1e-6).mass.tolist()  # doctest: +ELLIPSIS
        [0.666..., 0.333...]
        """
        tol = number(tol, "a finite tol of 0 or more", "0 merges equal points only", least=0.0)
        if tol > 0:
            group = _linked(self, tol).to(self.points.device)
        else:
            places = () if self.positions is None else (self.positions[:, None],)
            _, group = torch.unique(torch.cat([*places, self.points.double()], -1), dim=0, return_inverse=True)
        count = int(group.max()) + 1
        if count == len(self):
            return self
        # the first atom of a group keeps its place, so that merging undoes splitting
        first = torch.full((count,), len(self), device=group.device).scatter_reduce_(
            0, group, torch.arange(len(self), device=group.device), "amin"
        )
        order = first.argsort()
        group = order.argsort()[group]
        first = first[order]
        mass = torch.zeros(count, dtype=torch.float64, device=group.device).index_add_(0, group, self.mass)
        points = self.points[first]
        if tol > 0:
            offset = (self.points - points[group]).double() * self.mass[:, None]
            centre = torch.zeros_like(points, dtype=torch.float64).index_add_(0, group, offset) / mass[:, None]
            points = points + centre.to(points)
        return Measure(points, mass, None if self.positions is None else self.positions[first])

    def __repr__(self) -> str:
        where = "" if self.positions is None else ", with positions"
        return f"Measure({len(self)} atoms in R^{self.width}{where})"


@final
@dataclass(frozen=True, eq=False, repr=False)
class Gaussian:
    """A normal law, kept in float64.

    Attributes:
        mean: (d,).
        cov: The covariance, (d, d), which may be singular.
    """

    mean: Float[Tensor, " d"]
    cov: Float[Tensor, "d d"]

    def __post_init__(self):
        mean, cov = self.mean, self.cov
        check_tensor(mean, "mean", ("d",), "give one number per dimension")
        check_tensor(cov, "covariance", (len(mean), len(mean)), "match it to the mean")
        mean, cov = mean.detach().double(), cov.detach().double()
        size = float(cov.abs().max())
        if float((cov - cov.mT).abs().max()) > 1e-6 * size or float(eigh(cov)[0][0]) < -1e-6 * size:
            raise BadInputError("expected a symmetric positive semi-definite covariance, got one that is not; symmetrise it")
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "cov", (cov + cov.mT) / 2)

    def __repr__(self) -> str:
        return f"Gaussian(in R^{len(self.mean)})"

    def sample(self, n: int, seed: int = 0) -> Float[Tensor, "n d"]:
        """`n` independent points."""
        most = _NUMBERS // len(self.mean)
        n = whole(n, f"a whole number of points from 1 to {most}", "draw them in parts", least=1, below=most + 1)
        random = torch.Generator().manual_seed(seed_of(seed))
        noise = torch.randn(n, len(self.mean), generator=random, dtype=torch.float64)
        return self.mean + noise.to(self.mean.device) @ self.root()

    def root(self) -> Float[Tensor, "d d"]:
        """The symmetric square root of the covariance."""
        values, vectors = eigh(self.cov)
        return (vectors * values.clamp_min(0).sqrt()) @ vectors.mT


def _linked(mu: Measure, tol: float) -> Int[Tensor, " m"]:
    """Clusters of atoms joined by steps of at most `tol` within one position."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components
    from scipy.spatial import KDTree

    pairs = torch.as_tensor(KDTree(mu.points.detach().double().cpu().numpy()).query_pairs(tol, output_type="ndarray"))
    if mu.positions is not None:
        s = mu.positions.cpu()
        pairs = pairs[s[pairs[:, 0]] == s[pairs[:, 1]]]
    i, j = pairs.long().unbind(1)
    graph = coo_matrix((torch.ones(len(i)).numpy(), (i.numpy(), j.numpy())), shape=(len(mu), len(mu)))
    return torch.as_tensor(connected_components(graph, directed=False)[1]).long()


def _per_atom(t: Tensor, what: str, m: int, device: torch.device) -> Float[Tensor, " m"]:
    """One number per atom, float64."""
    check_tensor(t, f"{what}s", (m,), f"give one {what} per atom")
    return t.detach().to(device, torch.float64)


def _mass(weights: Tensor, m: int, device: torch.device) -> Float[Tensor, " m"]:
    """Weights checked and normalised to the last bit."""
    mass = _per_atom(weights, "weight", m, device)
    if bool((mass < 0).any()):
        raise BadInputError(
            f"expected weights of 0 or more, got {int((mass < 0).sum())} negative ones, the least {float(mass.min()):g}; "
            "mass is positive"
        )
    total = float(mass.sum())
    # weights written down, or rounded to single precision, are off by as much
    room = max(1e-6, m**0.5 * torch.finfo(weights.dtype).eps)
    if abs(total - 1) > room:
        side = "too much" if total > 1 else "too little"
        raise BadInputError(
            f"expected weights that sum to 1, got {total:.9g}, {abs(total - 1):.3g} {side}; divide them by their sum"
        )
    return mass / total


def _check_positions(positions: Tensor, m: int, device: torch.device) -> Float[Tensor, " m"]:
    s = _per_atom(positions, "position", m, device)
    outside = int((~((s >= 0) & (s <= 1))).sum())
    if outside:
        raise BadInputError(f"expected positions in [0, 1], got {outside} outside it; divide token indices by their number")
    return s
