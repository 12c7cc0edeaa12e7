"""How bad can it get? The worst tokens found in a set, beside what theory allows there, and the worst input near another."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.kinds import Softmax
from howsmooth.maps import Attention, Map
from howsmooth.progress import progress_bar
from howsmooth.results import OneNumber
from howsmooth.search.ascent import Climb, ascend, pairs_at, steepest
from howsmooth.search.families import check_layer, ranked
from howsmooth.search.sets import BallAround, Ellipsoid, TokenSet, check_width
from howsmooth.settings import seed_of, whole
from howsmooth.solve import Function, Options, solve, solve_batch
from howsmooth.spectral import Estimate
from howsmooth.spectral.dense import SMALL
from howsmooth.theory import Bound, Bounds, ball_bounds
from howsmooth.theory.around import Neighbourhood
from howsmooth.theory.over_ball.table import check_count
from howsmooth.theory.splitting import in_double

_MOST = 2**28  # numbers in all starts together, which a search holds several times over
_SHAKE = 0.05  # how far a shaken configuration is from its own, in units of the set's size


_NEAR_STARTS = 4  # the input, the boundary up its gradient, and random points of the boundary
_NEAR_STEPS, _NEAR_STEPS_SMALL = 10, 30  # measurements of every start, by default
_CONVERGED = 0.1  # share of all that was gained that the last third of the steps may still gain


@final
@dataclass(frozen=True, eq=False)
class WorstCase(OneNumber):
    """The worst input found: the constant over the set is at least `estimate.lower`, and `value` is attained by `tokens`.

    Attributes:
        tokens: Where the layer is.
        estimate: `L` there, with a lower and an upper bound.
        start: Where the climb began.
        began: `L` there.
        trace: The best `L` of all starts, first at the starts, then after each step.
        best_configuration: The best `L` among the configurations, if any.
        bound: The least upper bound of `bounds` over a ball that holds the set.
        ratio: `L / bound`, at most 1.
        status: `improved`, or `not improved` where no step gained over the best start.
        note: What a reader should know, in one sentence.
        seed: Of the random starts.
        unimproved: The starts that no step improved.
    """

    tokens: Float[Tensor, "n d"]
    estimate: Estimate
    start: str
    trace: tuple[float, ...]
    began: float
    best_configuration: float | None
    bound: Bound | None
    ratio: float | None
    status: Literal["improved", "not improved"]
    note: str
    unimproved: tuple[str, ...]
    seed: int

    @property
    def value(self) -> float:
        return self.estimate.value

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, and the tokens as lists."""
        names = ("status", "start", "began", "best_configuration", "ratio", "note", "seed")
        return {
            **self.estimate.to_dict(),
            "estimate_status": self.estimate.status,
            **{name: getattr(self, name) for name in names},
            "bound": None if self.bound is None else self.bound.id,
            "log_bound": None if self.bound is None else self.bound.log_value,
            "unimproved": list(self.unimproved),
            "trace": list(self.trace),
            "tokens": self.tokens.tolist(),
        }

    def __str__(self) -> str:
        share = "" if self.ratio is None or self.bound is None else f", {self.ratio:.3g} of the bound {self.bound.id}"
        return f"L = {self.value:.6g}{share}; from {self.start}, L = {self.began:.6g} before the climb; {self.note}"

    __repr__ = __str__


def find_worst(
    f: Function, space: TokenSet, n: int | None, steps: int | None, restarts: int | None, certify: float, seed: int
) -> WorstCase:
    """The worst sequence of `n` tokens found in a set; the search behind `howsmooth.worst_case`, which says what is what."""
    n, d = _shape(f, space, n)
    small, medium = n * d <= SMALL, n * d <= 16 * SMALL
    steps = _count((100 if small else 30) if steps is None else steps, "steps", 0)
    restarts = _count((32 if small else 8 if medium else 4) if restarts is None else restarts, "restarts", 1)
    if restarts * n * d > _MOST:
        raise BadInputError(
            f"expected n·d·restarts of at most {_MOST}, got {n}·{d}·{restarts}; search fewer tokens from fewer starts"
        )
    seed = seed_of(seed)
    options = Options(certify=certify, seed=seed)
    random = torch.Generator().manual_seed(seed)
    z, labels, designed = _starts(f, space, n, d, restarts, random)
    place = _place(f, space, z)
    f, dtype = _precision(f, space, z, small)
    # small maps on the CPU: a GPU would decompose one Jacobian after the other
    at = torch.device("cpu") if small and isinstance(f, Map) else place
    with progress_bar("climbing") as shown:
        climb = ascend(f, space, z.to(at, dtype), steps=steps, keep=max(1, restarts // 8), seed=seed, progress=shown)
    best = int(climb.value.argmax())
    tokens = space.tokens(climb.z[best : best + 1])[0].detach().to(place)
    estimate = solve_batch(f, tokens[None], options)[0][0]
    bound = Bounds(tuple(ball_bounds(f, n, space.reach)), "over the set").upper if isinstance(f, Attention) else None
    ratio = None
    if bound is not None and bound.log_value is not None and estimate.value > 0:
        ratio = math.exp(min(math.log(estimate.value) - bound.log_value, 700.0))
    improved = float(climb.value[best]) > float(climb.began.max()) * (1 + 1e-9)
    return WorstCase(
        tokens=tokens,
        estimate=estimate,
        start=labels[best],
        trace=climb.trace,
        began=float(climb.began[best]),
        best_configuration=float(climb.began[:designed].max()) if designed else None,
        bound=bound,
        ratio=ratio,
        status="improved" if improved else "not improved",
        note=_note(climb, improved, steps),
        unimproved=tuple(labels[i] for i in torch.nonzero(climb.value <= climb.began)[:, 0].tolist()),
        seed=seed,
    )


def _shape(f: Function, space: TokenSet, n: int | None) -> tuple[int, int]:
    """The number of tokens and their width."""
    if isinstance(space, BallAround):
        if n not in (None, len(space.x)):
            raise BadInputError(f"expected n = {len(space.x)} like the input to search around, got {n}; leave n out")
        n, d = space.x.shape
    elif isinstance(space, Ellipsoid):
        d = space.norm.width
    elif isinstance(f, Map):
        d = f.width
    else:
        raise BadInputError("expected a map of the package for a ball, got a function; search over=BallAround(x, radius)")
    if isinstance(f, Map):
        check_width(d, f.width)
    elif not callable(f):
        raise BadInputError(f"expected a map or a function of one tensor, got {type(f).__name__}; pass a callable")
    if isinstance(f, Attention):
        check_layer(f, n)
    return check_count(n), d


def _place(f: Function, space: TokenSet, z: Tensor) -> torch.device:
    """Where to search: where an input is that is searched around, else a map's weights, else those of the norm of a set."""
    if isinstance(space, BallAround):
        return z.device
    if isinstance(f, Map):
        return f.device
    return space.norm.device if isinstance(space, Ellipsoid) else z.device


def _precision(f: Function, space: TokenSet, z: Tensor, small: bool) -> tuple[Function, torch.dtype]:
    """What is climbed and in which precision: float64 where that is cheap and `f` can be, else as the weights or the set."""
    if isinstance(f, Map):
        return f, torch.float64 if small else torch.promote_types(f.dtype, torch.float32)
    own = space.x.dtype if isinstance(space, BallAround) else space.norm.dtype if isinstance(space, Ellipsoid) else z.dtype
    own = torch.promote_types(own, torch.float32)
    if not small:
        return f, own
    finer, at = in_double(f, space.tokens(z[:1].to(own)))
    return finer, at.dtype


def _count(value: int, what: str, least: int) -> int:
    return whole(value, f"a whole number of {what}, at least {least}", "leave it out for the default", least=least)


def _starts(
    f: Function, space: TokenSet, n: int, d: int, restarts: int, random: torch.Generator
) -> tuple[Float[Tensor, "starts n d"], list[str], int]:
    """Coordinates to start from, what each is, and how many are configurations."""
    if isinstance(space, BallAround):
        z = torch.cat([space.x.detach().double()[None], space.sample(restarts - 1, n, d, random)])
        return z, ["the input itself"] + [f"random start {i}" for i in range(restarts - 1)], 0
    designed, labels = torch.empty(0, n, d, dtype=torch.float64), []
    if isinstance(f, Attention):
        # configurations are of softmax with the same logits; for another kind they are places to start from
        twin = f if f.kind.traits.plain else replace(f, kind=Softmax())
        candidates = ranked(twin, n, space)[: max(restarts // 4, min(4, restarts))]
        designed = torch.stack([c.place(n) for c in candidates]).cpu()
        labels = [str(c) for c in candidates]
    shaken = designed[: max(0, restarts - 2 * len(designed))]
    noise = torch.randn(shaken.shape, generator=random, dtype=torch.float64) * (_SHAKE * space.size / d**0.5)
    rest = max(0, restarts - len(designed) - len(shaken))
    z = torch.cat([designed, space.project(shaken + noise), space.sample(rest, n, d, random)])
    labels += [f"{label}, shaken" for label in labels[: len(shaken)]] + [f"random start {i}" for i in range(rest)]
    return z, labels, len(designed)


def _note(climb: Climb, improved: bool, steps: int) -> str:
    if steps == 0:
        return "no step was asked for: this is the best of the starts"
    if not improved:
        return f"no step improved the best start in {len(climb.trace) - 1} steps: raise steps and restarts, or try another seed"
    tail = climb.trace[-max(2, len(climb.trace) // 10)]
    if climb.trace[-1] > 1.01 * tail:
        return "still climbing by more than 1 % at the last tenth of the steps: more steps will find more"
    return "converged to 1 % over the last tenth of the steps"


class WorstNear(NamedTuple):
    """The constant at the best point, the point, and whether the search had converged there."""

    estimate: Estimate
    point: Float[Tensor, "n d"]
    converged: bool


def slope_at(f: Map, neighbourhood: Neighbourhood, tokens: tuple[int, ...] | None, here: Estimate) -> Float[Tensor, "moving d"]:
    """The gradient of the constant at the centre, for any size of the neighbourhood. Parameters: as for `find_near`."""
    function, area = _by_tokens(f.to(dtype=torch.float64), neighbourhood, tokens)
    x = area.point[None]
    return torch.nan_to_num(steepest(function, lambda z: z, x, pairs_at(function, x, None, here.seed))[0])


def find_near(
    f: Map,
    neighbourhood: Neighbourhood,
    tokens: tuple[int, ...] | None,
    steps: int | None,
    options: Options,
    here: Estimate,
    slope: Float[Tensor, "moving d"] | None = None,
) -> WorstNear:
    """The worst input found in a neighbourhood, in float64.

    tokens: by which the Jacobian is taken.  steps: measurements of every start.  here: the constant at the centre.
    slope: of the constant there, as `slope_at` gives it, where it is known.
    """
    small = neighbourhood.point.numel() <= SMALL
    default = _NEAR_STEPS_SMALL if small else _NEAR_STEPS
    fix = "leave it out for the default"
    steps = default if steps is None else whole(steps, "a whole number of steps, at least 0", fix)
    function, area = _by_tokens(f.to(dtype=torch.float64), neighbourhood, tokens)
    space = BallAround(area.point, float(area.radii.max()), "token" if area.total is None else "sequence")
    x = area.point[None]
    slope = slope_at(f, neighbourhood, tokens, here) if slope is None else slope
    random = torch.Generator().manual_seed(here.seed)
    starts = torch.cat([x, space.along(slope)[None], space.sample(_NEAR_STARTS - 2, x.shape[1], x.shape[2], random)])
    climb = ascend(function, space, starts, steps=steps, keep=1, seed=here.seed)
    point = space.project(climb.z[climb.value.argmax()])
    whole_point = neighbourhood.point.clone()
    whole_point[list(tokens) if tokens is not None else slice(None)] = point
    there = solve(f, whole_point, replace(options, seed=here.seed)).estimate
    gained = climb.trace[-1] - climb.trace[0]
    late = climb.trace[-1] - climb.trace[-1 - len(climb.trace) // 3]
    converged = here.status != "step limit" and steps > 0 and late <= max(_CONVERGED * gained, options.tol * climb.trace[-1])
    if there.value > here.value:
        return WorstNear(there, whole_point, converged)
    return WorstNear(here, neighbourhood.point, converged)


def _by_tokens(f: Map, neighbourhood: Neighbourhood, tokens: tuple[int, ...] | None) -> tuple[Function, Neighbourhood]:
    """The map of the tokens that may move alone, and where they may be; a map with padding takes its inputs one by one."""
    padded = isinstance(f, Attention) and f.attention_mask is not None
    if tokens is None and not padded:
        return f, neighbourhood
    free = list(tokens) if tokens is not None else list(range(len(neighbourhood.point)))
    index = torch.tensor(free, device=neighbourhood.point.device)

    def moved(z: Tensor) -> Tensor:
        x = neighbourhood.point.expand(len(z), -1, -1).index_copy(1, index, z)
        return torch.cat([f(t[None]) for t in x])

    return moved, Neighbourhood(neighbourhood.point[free], neighbourhood.radii[free], neighbourhood.total)
