"""The largest constant found near an input: ascent from it, from where its own gradient points, and from the boundary."""

from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.maps import Attention, Map
from howsmooth.search.ascent import ascend
from howsmooth.search.gradient import pairs_at, steepest
from howsmooth.search.sets import Near
from howsmooth.settings import whole
from howsmooth.solve import Function, Options, solve
from howsmooth.spectral import Estimate
from howsmooth.spectral.dense import SMALL
from howsmooth.theory.around import Neighbourhood

_STARTS = 4  # the input, the boundary up its gradient, and random points of the boundary
_STEPS, _STEPS_SMALL = 10, 30  # measurements of every start, by default
_SETTLED = 0.1  # share of all that was gained that the last third of the steps may still gain


class Found(NamedTuple):
    """The constant at the best point, the point, and whether the search had settled there."""

    estimate: Estimate
    point: Float[Tensor, "n d"]
    settled: bool


def slope_at(f: Map, neighbourhood: Neighbourhood, tokens: tuple[int, ...] | None, here: Estimate) -> Float[Tensor, "moving d"]:
    """The gradient of the constant at the centre, for any size of the neighbourhood. Parameters: as for `find_near`."""
    function, area = _by_tokens(f.to(dtype=torch.float64), neighbourhood, tokens)
    x = area.point[None]
    return torch.nan_to_num(steepest(function, Near(area).tokens, x, pairs_at(function, x, None, here.seed))[0])


def find_near(
    f: Map,
    neighbourhood: Neighbourhood,
    tokens: tuple[int, ...] | None,
    steps: int | None,
    options: Options,
    here: Estimate,
    slope: Float[Tensor, "moving d"] | None = None,
) -> Found:
    """The worst input found in a neighbourhood, in float64.

    tokens: by which the Jacobian is taken.  steps: measurements of every start.  here: the constant at the centre.
    slope: of the constant there, as `slope_at` gives it, where it is known.
    """
    small = neighbourhood.point.numel() <= SMALL
    default = _STEPS_SMALL if small else _STEPS
    fix = "leave it out for the default"
    steps = default if steps is None else whole(steps, "a whole number of steps, at least 0", fix)
    function, area = _by_tokens(f.to(dtype=torch.float64), neighbourhood, tokens)
    space = Near(area)
    x = area.point[None]
    slope = slope_at(f, neighbourhood, tokens, here) if slope is None else slope
    length = slope.norm(dim=-1, keepdim=True)
    uphill = x + area.radii[:, None] * slope / torch.where(length > 0, length, 1.0)
    if area.total is not None and float(slope.norm()) > 0:
        uphill = x + area.total * slope / slope.norm()
    random = torch.Generator().manual_seed(here.seed)
    starts = torch.cat([x, uphill, space.sample(_STARTS - 2, x.shape[1], x.shape[2], random)])
    climb = ascend(function, space, starts, steps=steps, keep=1, seed=here.seed)
    point = space.project(climb.z[climb.value.argmax()])
    whole_point = neighbourhood.point.clone()
    whole_point[list(tokens) if tokens is not None else slice(None)] = point
    there = solve(f, whole_point, replace(options, seed=here.seed)).estimate
    gained = climb.trace[-1] - climb.trace[0]
    late = climb.trace[-1] - climb.trace[-1 - len(climb.trace) // 3]
    settled = here.status != "step limit" and steps > 0 and late <= max(_SETTLED * gained, options.tol * climb.trace[-1])
    if there.value > here.value:
        return Found(there, whole_point, settled)
    return Found(here, neighbourhood.point, settled)


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
