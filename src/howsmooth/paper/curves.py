"""Rows gathered into curves, curves fitted: both for the constant and for what the scripts print."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, final

from howsmooth.study.fit import GrowthFit, fit_growth

PAPER_LENGTHS = 98  # the longest window of the paper's growth curves

# exponents drawn on the paper's plots, by our curve of the same layer; of a subject's name, the last part
PRINTED: dict[tuple[str, str, int, str], float] = {
    ("bert-base-uncased", "unmasked", 0, "attention"): 0.24,
    ("bert-base-uncased", "masked", 6, "attention"): 0.25,
    ("gpt2", "masked", 0, "attention"): 0.26,
    ("gpt2", "masked", 6, "attention"): 0.51,
    ("random:gpt2", "masked", 0, "attention"): 0.25,
    ("random:gpt2", "masked", 6, "attention"): 0.25,
}
PRINTED_ADVERSARIAL = 0.5


@final
@dataclass(frozen=True)
class Point:
    """One measurement of a curve: `value` is `L`, `scripts` what the public scripts print, `radius` is `R`."""

    n: int
    sample: int
    value: float
    upper: float
    scripts: float
    radius: float


@final
@dataclass(frozen=True)
class Curve:
    """One layer of one subject against the length."""

    study: str
    subject: str
    masking: str
    layer: int
    map: str
    points: tuple[Point, ...]

    @property
    def label(self) -> str:
        return self.subject if self.subject.startswith("one head") else f"{self.subject}, {self.masking}, layer {self.layer}"

    @property
    def lengths(self) -> list[int]:
        return sorted({p.n for p in self.points})

    @property
    def printed(self) -> float | None:
        """The exponent drawn on the paper's plot of this curve, where there is one."""
        if self.study == "adversarial":
            return PRINTED_ADVERSARIAL if self.map == "eigenvector tokens" else None
        return PRINTED.get((PurePosixPath(self.subject).name, self.masking, self.layer, self.map))

    def radius(self, n: int) -> float:
        found = [p.radius for p in self.points if p.n == n]
        return sum(found) / len(found)

    @cached_property
    def fit(self) -> GrowthFit | None:
        """Of `L`, over the paper's lengths."""
        return self.fitted("value")

    @cached_property
    def scripts_fit(self) -> GrowthFit | None:
        return self.fitted("scripts")

    @cached_property
    def long_fit(self) -> GrowthFit | None:
        """Of `L` over all lengths, where some go past the paper's."""
        return self.fitted("value", 10**9) if self.lengths[-1] > PAPER_LENGTHS else None

    def fitted(self, quantity: str, longest: int = PAPER_LENGTHS) -> GrowthFit | None:
        points = [p for p in self.points if p.n <= longest and getattr(p, quantity) > 0]
        if len({p.n for p in points}) < 2:
            return None
        return fit_growth([p.n for p in points], [getattr(p, quantity) for p in points], [p.sample for p in points])


@final
@dataclass(frozen=True)
class Exponent:
    """A curve's exponents with 95 % intervals: of `L` and of what the scripts print, to n = 98.

    tail: of `L` over the upper half of these lengths.  longer: of `L` to the longest.  printed: on the paper's plot.
    """

    study: str
    subject: str
    masking: str
    layer: int
    map: str
    shortest: int
    longest: int
    samples: int
    exponent: float
    low: float | None
    high: float | None
    tail: float | None
    scripts: float
    scripts_low: float | None
    scripts_high: float | None
    longer: float | None
    printed: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def curves(rows: Iterable[Mapping[str, Any]]) -> list[Curve]:
    """Rows of text, modules and adversarial tokens by layer, in order of appearance; other rows are left out."""
    groups: dict[tuple[str, str, str, int, str], list[Point]] = defaultdict(list)
    for r in rows:
        if r.get("study") in ("real", "random", "trap", "adversarial"):
            point = Point(r["n"], r["sample"], r["value"], r["upper"], r["scripts"], r["radius"])
            groups[r["study"], r["subject"], r["masking"], r["layer"], r["map"]].append(point)
    return [Curve(*key, tuple(sorted(points, key=lambda p: (p.n, p.sample)))) for key, points in groups.items()]


def exponents(found: Sequence[Curve]) -> list[Exponent]:
    """Fits of every curve with two lengths or more."""
    rows = []
    for c in found:
        fit, scripts, longer = c.fit, c.scripts_fit, c.long_fit
        if fit is None or scripts is None:
            continue
        rows.append(
            Exponent(
                *(c.study, c.subject, c.masking, c.layer, c.map),
                shortest=fit.lengths[0],
                longest=c.lengths[-1],
                samples=fit.samples,
                exponent=fit.exponent.value,
                low=fit.exponent.low,
                high=fit.exponent.high,
                tail=_tail(fit),
                scripts=scripts.exponent.value,
                scripts_low=scripts.exponent.low,
                scripts_high=scripts.exponent.high,
                longer=None if longer is None else longer.exponent.value,
                printed=c.printed,
            )
        )
    return rows


def _tail(fit: GrowthFit) -> float | None:
    """The exponent over the upper half of the lengths, where what is small at first no longer bends the curve."""
    points = [(n, mean) for n, mean in zip(fit.lengths, fit.means, strict=True) if 2 * n >= fit.lengths[-1]]
    return fit_growth(*zip(*points, strict=True)).exponent.value if len(points) > 1 else None
