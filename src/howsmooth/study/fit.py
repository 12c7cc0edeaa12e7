"""How a constant grows with the length: an exponent with its interval, what the power law leaves over, and where it breaks.

The fit is least squares of `log L` against `log n` on the geometric mean over samples at each length. One slope can hide a
jump, so lengths where the level jumps or the slope bends are looked for, one at a time, by the largest F statistic over all
places; its distribution without a break depends on the lengths alone (Andrews 1993; here simulated exactly for Gaussian noise).

Intervals come from the studentised bootstrap (Davison & Hinkley 1997, §5.2 and §6.3). With five samples or more that were
measured at every length, each sample gives its own coefficient, and the samples are resampled: this holds whatever the
dependence between the lengths of one sample. With fewer, the residuals of the fit are resampled, which takes scatter about it
as independent noise.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

import numpy as np
from jaxtyping import Float

from howsmooth.errors import BadInputError

_ENOUGH_SAMPLES = 5
_SIGNIFICANT = 0.01  # chance of a break where there is none, per curve
_LEAST_JUMP = 1.2  # factor below which a jump is not worth a reader's time
_LEAST_BEND = 0.1  # the same for a change of exponent
_MOST_BREAKS = 3
_SIMULATIONS = 2000

Array = np.ndarray
Kind = Literal["jump", "bend"]


@final
@dataclass(frozen=True)
class Interval:
    """A number between two ends that hold it with probability `level`; both ends are None where too little was measured."""

    value: float
    low: float | None
    high: float | None

    def exp(self) -> "Interval":
        """Of a factor, where this one is of its logarithm."""
        low, high = (None if end is None else math.exp(end) for end in (self.low, self.high))
        return Interval(math.exp(self.value), low, high)


@final
@dataclass(frozen=True)
class Break:
    """Where the power law breaks.

    jump: from length `before` to the next one, `after`, `L` is multiplied by `change` beyond what the slope explains.
    bend: at length `before` = `after` the exponent changes by `change`.
    chance: probability of so clear a break under a plain power law.
    """

    kind: Kind
    before: int
    after: int
    change: Interval
    chance: float


@final
@dataclass(frozen=True)
class Step:
    """From one measured length to the next: `ratio` of the constants, and the exponent it amounts to."""

    before: int
    after: int
    ratio: float
    exponent: float


@final
@dataclass(frozen=True)
class GrowthFit:
    """`L ≈ scale · n^exponent`, and the same with breaks.

    lengths, means: what was fitted, geometric means over `samples` samples.  exponent: of the one line through everything.
    fitted, residuals: that line, and `mean/fitted`.  breaks: in order of length; `exponent_apart`, `fitted_apart` and
    `residuals_apart` belong to the fit that allows for them (the exponent up to the first bend).  steepest: between
    neighbouring lengths.  scatter: root mean square of the logarithm of the residuals.  method: what was resampled.
    """

    lengths: tuple[int, ...]
    means: tuple[float, ...]
    lows: tuple[float, ...]
    highs: tuple[float, ...]
    samples: int
    level: float
    method: Literal["samples", "residuals", "none"]
    exponent: Interval
    scale: float
    fitted: tuple[float, ...]
    residuals: tuple[float, ...]
    scatter: float
    breaks: tuple[Break, ...]
    exponent_apart: Interval
    fitted_apart: tuple[float, ...]
    residuals_apart: tuple[float, ...]
    steepest: Step

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit_growth(
    lengths: Sequence[int],
    values: Sequence[float],
    samples: Sequence[int] | None = None,
    *,
    level: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> GrowthFit:
    """Fit a curve given as rows: the length, the constant and, where there are several, the sample of each measurement.

    level: of the intervals.  resamples, seed: of the bootstrap.

    >>> n = [8, 16, 32, 64, 128, 136, 256, 512]
    >>> fit = fit_growth(n, [k**0.25 * (3 if k > 128 else 1) * (1 + 0.01 * (-1) ** i) for i, k in enumerate(n)])
    >>> print(f"{fit.exponent.value:.2f}, with the jump apart {fit.exponent_apart.value:.2f}")
    0.56, with the jump apart 0.25
    >>> [(b.kind, b.before, b.after, round(b.change.value, 1)) for b in fit.breaks]
    [('jump', 128, 136, 3.0)]
    """
    table, n = _table(lengths, values, samples)
    if not 0 < level < 1:
        raise BadInputError(f"expected 0 < level < 1, got {level}; the default is 0.95")
    complete = table[~np.isnan(table).any(1)]
    whole = complete if len(complete) >= _ENOUGH_SAMPLES else table
    method = "samples" if len(complete) >= _ENOUGH_SAMPLES else "residuals" if len(n) >= 4 else "none"
    y, x = np.nanmean(whole, axis=0), np.log(n)
    random = np.random.default_rng(seed)

    def interval(design: Array, column: int) -> Interval:
        if method == "none" or (method == "residuals" and len(n) - design.shape[1] < 2):
            return Interval(float(_solve(design, y)[column]), None, None)
        if method == "samples":
            return _over_samples(np.linalg.pinv(design)[column] @ complete.T, level, resamples, random)
        return _over_residuals(design, y, column, level, resamples, random)

    line = np.stack([np.ones_like(x), x], axis=1)
    level_and_slope = _solve(line, y)
    design, places = _find_breaks(line, y, random)
    breaks = []
    for column, (kind, k, chance) in enumerate(places, start=2):
        change, jump = interval(design, column), kind == "jump"
        breaks.append(Break(kind, int(n[k]), int(n[k + jump]), change.exp() if jump else change, chance))
    fitted, apart = line @ level_and_slope, design @ _solve(design, y)
    slopes = np.diff(y) / np.diff(x)
    top = int(np.argmax(slopes))
    return GrowthFit(
        lengths=tuple(n.astype(int).tolist()),
        means=tuple(np.exp(y).tolist()),
        lows=tuple(np.exp(np.nanmin(whole, axis=0)).tolist()),
        highs=tuple(np.exp(np.nanmax(whole, axis=0)).tolist()),
        samples=len(whole),
        level=level,
        method=method,
        exponent=interval(line, 1),
        scale=float(np.exp(level_and_slope[0])),
        fitted=tuple(np.exp(fitted).tolist()),
        residuals=tuple(np.exp(y - fitted).tolist()),
        scatter=float(np.sqrt(np.mean((y - fitted) ** 2))),
        breaks=tuple(sorted(breaks, key=lambda b: b.before)),
        exponent_apart=interval(design, 1),
        fitted_apart=tuple(np.exp(apart).tolist()),
        residuals_apart=tuple(np.exp(y - apart).tolist()),
        steepest=Step(int(n[top]), int(n[top + 1]), float(np.exp(y[top + 1] - y[top])), float(slopes[top])),
    )


def slope(values: dict[Any, float]) -> float | None:
    """The exponent of the power law nearest to positive values, by their place; none of a single one."""
    points = [(math.log(x), math.log(y)) for x, y in values.items() if y > 0]
    if len(points) < 2:
        return None
    a, b = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    return sum((x - a) * (y - b) for x, y in points) / sum((x - a) ** 2 for x, _ in points)


def _table(lengths: Sequence[int], values: Sequence[float], samples: Sequence[int] | None) -> tuple[Array, Array]:
    """log L as (samples, lengths), NaN where nothing was measured, and the lengths in order."""
    n, L = np.asarray(lengths, float), np.asarray(values, float)
    s = np.zeros(len(n), int) if samples is None else np.asarray(samples, int)
    if not n.ndim == L.ndim == 1 or not len(n) == len(L) == len(s):
        raise BadInputError(f"expected as many lengths as values and samples, got {len(n)}, {len(L)}, {len(s)}; give rows")
    if not (np.isfinite(L).all() and (L > 0).all() and np.isfinite(n).all() and (n > 0).all()):
        raise BadInputError("expected positive, finite lengths and values, got others; leave those rows out of a power law")
    kinds, column = np.unique(n, return_inverse=True)
    if len(kinds) < 2:
        raise BadInputError(f"expected at least two different lengths, got {len(kinds)}; measure another length")
    names, row = np.unique(s, return_inverse=True)
    table = np.full((len(names), len(kinds)), np.nan)
    for i, j, value in zip(row, column, np.log(L), strict=True):
        if not np.isnan(table[i, j]):
            raise BadInputError(f"expected one value per sample and length, got two at n = {kinds[j]:g}; number the samples")
        table[i, j] = value
    return table, kinds


def _solve(design: Float[Array, "m p"], y: Float[Array, " m"]) -> Float[Array, " p"]:
    return np.linalg.lstsq(design, y, rcond=None)[0]


def _over_samples(own: Array, level: float, resamples: int, random: np.random.Generator) -> Interval:
    """The mean of the samples' own coefficients, with its studentised bootstrap interval."""
    value, error = own.mean(), own.std(ddof=1)  # the factor 1/√S cancels
    if error <= 1e-12 * max(1.0, abs(value)):
        return Interval(float(value), float(value), float(value))
    drawn = own[random.integers(len(own), size=(resamples, len(own)))]
    errors = drawn.std(axis=1, ddof=1)
    told = errors > 1e-9 * error  # a resample of one sample over and over says nothing
    away = (drawn.mean(1)[told] - value) / errors[told]
    low, high = np.quantile(away, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value), float(value - high * error), float(value - low * error))


def _over_residuals(
    design: Float[Array, "m p"], y: Array, column: int, level: float, resamples: int, random: np.random.Generator
) -> Interval:
    """A coefficient with the studentised interval of the residual bootstrap."""
    m, p = design.shape
    inverse = np.linalg.pinv(design)
    hat = design @ inverse
    unit = np.sqrt((inverse[column] ** 2).sum())  # standard error of the coefficient for noise of variance one

    def spread(residuals: Array) -> Array:
        return unit * np.sqrt((residuals**2).sum(-1) / (m - p))

    value = inverse[column] @ y
    residuals = y - hat @ y
    error = spread(residuals)
    if error <= 1e-12 * max(1.0, abs(value)):  # an exact power law
        return Interval(float(value), float(value), float(value))
    raised = residuals / np.sqrt(np.clip(1 - np.diag(hat), 1e-9, None))
    noise = (raised - raised.mean())[random.integers(m, size=(resamples, m))]
    away = noise @ inverse[column] / np.maximum(spread(noise - noise @ hat.T), 1e-300)
    low, high = np.quantile(away, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value), float(value - high * error), float(value - low * error))


def _find_breaks(
    line: Float[Array, "m 2"], y: Array, random: np.random.Generator
) -> tuple[Array, list[tuple[Kind, int, float]]]:
    """The design with a column per break, and the breaks: kind, index of the length before, chance."""
    m, x = len(y), line[:, 1]
    places: list[tuple[Kind, int]] = [*(("jump", k) for k in range(1, m - 2)), *(("bend", k) for k in range(2, m - 2))]
    design, breaks = line, []
    while places and m - design.shape[1] - 1 >= 2 and len(breaks) < _MOST_BREAKS:
        columns = np.stack([_column(kind, k, x) for kind, k in places], axis=1)
        gain = _f_statistics(design, columns, y[None])[0]
        order = [j for j in np.argsort(-gain) if _worthwhile(design, columns[:, j], y, *places[j])]
        if not order:
            break
        best = order[0]
        null = _f_statistics(design, columns, random.standard_normal((_SIMULATIONS, m))).max(1)
        chance = float((1 + (null >= gain[best]).sum()) / (_SIMULATIONS + 1))
        if chance > _SIGNIFICANT:
            break
        breaks.append((*places[best], chance))
        design = np.column_stack([design, columns[:, best]])
        places.pop(best)
    return design, breaks


def _column(kind: str, k: int, x: Array) -> Array:
    """What a break after length k adds to the curve: a step, or a hinge."""
    return (np.arange(len(x)) > k).astype(float) if kind == "jump" else np.maximum(x - x[k], 0)


def _f_statistics(design: Array, columns: Array, y: Float[Array, "many m"]) -> Float[Array, "many places"]:
    """F of adding each column alone."""
    q, _ = np.linalg.qr(design)
    rest, new = y - y @ q @ q.T, columns - q @ (q.T @ columns)
    size = (new**2).sum(0)
    usable = size > 1e-9 * (columns**2).sum(0)  # a column the design already spans
    gain = np.where(usable, (rest @ new) ** 2 / np.where(usable, size, 1), 0)
    left = np.maximum((rest**2).sum(1, keepdims=True) - gain, 1e-12 * (y**2).sum(1, keepdims=True) + 1e-300)
    return gain / left * (y.shape[1] - design.shape[1] - 1)


def _worthwhile(design: Array, column: Array, y: Array, kind: str, k: int) -> bool:
    """Large enough to matter; and a jump must be seen between its two lengths, not spread over many by curvature."""
    *others, change = _solve(np.column_stack([design, column]), y)
    if kind == "bend":
        return abs(change) >= _LEAST_BEND
    step = np.diff(y - design @ others)[k]
    return abs(change) >= np.log(_LEAST_JUMP) and step * np.sign(change) >= abs(change) / 2
