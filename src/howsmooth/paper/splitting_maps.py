"""Where splitting pays: the map of two atoms on a line, and how often it does on layers and their inputs."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention, Map
from howsmooth.measures.measure import Measure
from howsmooth.paper.meanfield import two_diracs
from howsmooth.verbs import splitting


@final
@dataclass(frozen=True)
class MapPoint:
    """Two atoms at `x` (mass `mass`) and `y` on a line: what splitting does in units of moving."""

    alpha: float
    mass: float
    x: float
    y: float
    moved: float
    split: float

    @property
    def gain(self) -> float:
        return self.split / self.moved if self.moved else math.inf

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"gain": self.gain}


def splitting_map(
    alphas: Sequence[float] = (-1.0, 1.0), masses: Sequence[float] = (0.5, 0.9, 0.99), extent: float = 12.0, points: int = 121
) -> list[MapPoint]:
    """Two atoms on a grid, for every `A = α`, `V = 1` and every mass of the first.

    In dimension one `A = α` at `x` is `A = ±1` at `√|α| x`, so the sign of α is what matters.
    """
    if not all(0 < m < 1 for m in masses) or not masses:
        raise BadInputError(f"expected masses between 0 and 1, got {list(masses)}; each is the first atom's")
    if not alphas or not all(math.isfinite(a) and a != 0 for a in alphas):
        raise BadInputError(f"expected finite A other than 0, got {list(alphas)}; try -1 and 1")
    if not 0 < extent < math.inf or points < 2:
        raise BadInputError(f"expected a positive extent and two points or more, got {extent} and {points}; correct them")
    axis = extent * (2 * torch.arange(points, dtype=torch.float64) - (points - 1)) / (points - 1)  # symmetric, so 0 is 0
    x, y = torch.meshgrid(axis, axis, indexing="ij")
    rows = []
    for alpha in alphas:
        for mass in masses:
            found = two_diracs(alpha, x, y, torch.full_like(x, math.log(mass / (1 - mass))))
            columns = (x, y, found.moved, found.split.amax(0))
            rows += [MapPoint(alpha, mass, *row) for row in zip(*(c.flatten().tolist() for c in columns), strict=True)]
    return rows


@final
@dataclass(frozen=True)
class Case:
    """One layer at one input."""

    label: str
    n: int
    width: int
    moved: float
    split: float
    gain: float
    pays: bool
    certain: bool
    token: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@final
@dataclass(frozen=True)
class Share:
    """How often splitting pays among the cases of one label."""

    label: str
    cases: int
    share: float
    largest: float
    median: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def frequency(problems: Iterable[tuple[str, Map, Tensor | Measure]]) -> list[Case]:
    """Does splitting pay? One row for every labelled map and input: of random layers, or of a model's."""
    rows = []
    for label, f, x in problems:
        s = splitting(f, x)
        rows.append(Case(label, len(x), f.width, s.moved.value, s.split.value, s.gain, s.pays, s.certain, s.token))
    return rows


def shares(cases: Sequence[Case]) -> list[Share]:
    """Cases counted by label, in order of appearance."""
    rows = []
    for label in dict.fromkeys(c.label for c in cases):
        gains = sorted(c.gain for c in cases if c.label == label)
        pays = sum(c.pays for c in cases if c.label == label)
        rows.append(Share(label, len(gains), pays / len(gains), gains[-1], gains[len(gains) // 2]))
    return rows


def random_layers(
    count: int,
    lengths: Sequence[int] = (2, 4, 8, 16),
    logits: Sequence[float] = (0.5, 1.0, 2.0, 4.0, 8.0),
    width: int = 4,
    heads: int = 1,
    causal: bool = False,
    seed: int = 0,
) -> Iterator[tuple[str, Attention, Tensor]]:
    """`count` random layers and Gaussian inputs for each length and size of logits, labelled `n=…, logits=…`.

    logits: the standard deviation of `q·k/√d_h` on Gaussian tokens.
    """
    if count < 1 or width < 1 or heads < 1 or width % heads:
        raise BadInputError(
            f"expected count ≥ 1 and heads that divide the width, got {count}, {heads} and {width}; correct them"
        )
    random = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    for n in lengths:
        for size in logits:
            for _ in range(count):
                w_q, w_k, w_v, w_o = (gaussian(width, width) / width**0.5 for _ in range(4))
                layer = Attention(size * w_q, w_k, w_v, w_o, heads=heads, causal=causal)
                yield f"n={n}, logits={size:g}", layer, gaussian(n, width)
