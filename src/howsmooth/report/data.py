"""What a report is made of: rows, whoever measured them. The answer, the page and the figures read nothing else."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import geometric_mean
from typing import final

from howsmooth.errors import BadInputError
from howsmooth.study import Growth
from howsmooth.study.fit import Break, GrowthFit
from howsmooth.study.jobs import Cells
from howsmooth.study.layers import LayerRow
from howsmooth.study.maps_beside import SIDE_BY_SIDE
from howsmooth.study.question import mean
from howsmooth.study.swapped import KINDS

Token = tuple[str, str, bool]  # what stands before it, the token itself, whether the tokenizer added it

# What the report reads in the rows of each kind; other kinds and other keys are left alone.
KEYS: dict[str, tuple[str, ...]] = {
    "layer": ("layer", "n", "sample", "value", "upper", "confidence", "status", "radius"),
    "held": ("layer", "n", "token", "word", "share", "whole", "value"),
    "map": ("layer", "n", "map", "value", "relative"),
    "head": ("layer", "head", "n", "value"),
    "bounds": ("layer", "n", "value", "bounds"),
    "near": ("layer", "n", "value", "size", "within", "lower_ends", "upper_ends"),
    "change": ("layer", "n", "sample", "change", "size", "certified", "first_order", "attacked"),
    "splitting": ("layer", "n", "moved", "value"),
    "worst": ("layer", "n", "radius_max", "text", "value", "log_ceiling", "how"),
    "influence": ("layer", "n", "norms", "accuracy"),
    "variant": ("layer", "n", "variant", "way", "factor", "value", "upper", "relative", "entropy", "matched", "cost", "steps"),
}
_MOST = 0.5  # share above which one token carries a direction
_LAYERS = 5  # one layer out of so many with the same such token, and two at least, make it a sink


@final
@dataclass(frozen=True)
class Methods:
    """What a reader needs to make the report again."""

    model: str
    text: str
    map: str
    command: str
    versions: Mapping[str, str]
    seed: int = 0
    tol: float = 1e-3
    date: str = ""
    seconds: float | None = None


@final
@dataclass(frozen=True)
class Sink:
    """The token that carries most of the worst direction in many layers. rows: of kind `held`, those layers."""

    token: int
    word: str
    rows: Sequence[Cells]


@final
@dataclass(frozen=True)
class ReportData:
    """A whole report. Only rows of kind `layer` and methods are needed; a part that is empty is left out.

    rows: as the studies make them, with at least the keys in `KEYS`. A row of kind `layer` may hold `shares`, every token's
    share `|v_i|²` of the unit direction that the layer stretches most; one of kind `bounds` holds a list of bounds, each with
    where (point or ball), id, name, side, log_value (None where it does not apply), statement, source and reason. One of kind
    `held` is a layer whose leading `token` is held fixed, `whole` its constant where that may move too; one of kind `map` is
    another map of the layer; one of kind `near` holds, for every radius in `within`, the constant attained and certified there;
    one of kind `change` holds radii of one layer at one sample; one of kind `influence` holds `norms`, a list for each output
    token, and their relative accuracy; one of kind `variant` is the layer with another kind of attention, its tokens multiplied
    by `factor`.
    texts: by length, the tokens that the shares belong to.  notes: findings in words, shown under the answer.
    """

    rows: Sequence[Cells]
    methods: Methods
    texts: Mapping[int, Sequence[Token]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    title: str = "How smooth is attention?"

    def __post_init__(self):
        for row in self.rows:
            missing = [key for key in ("kind", *KEYS.get(row.get("kind", ""), ())) if key not in row]
            if missing:
                raise BadInputError(f"expected {missing[0]!r} in every row, got one with {', '.join(row)}; add it")
        if not self.of("layer"):
            raise BadInputError("expected at least one measurement, got none; measure a layer first")
        for row in self.of("layer"):
            if not (math.isfinite(row["value"]) and row["value"] >= 0):
                raise BadInputError(
                    f"expected finite constants, got {row['value']} for layer {row['layer']}; leave that row out"
                )
            words = self.texts.get(row["n"], ())
            if words and len(row.get("shares", words)) != len(words):
                raise BadInputError(
                    f"expected a share for each of {len(words)} tokens, got {len(row['shares'])} for layer {row['layer']}; "
                    "match them"
                )

    def of(self, kind: str) -> list[Cells]:
        """The rows of one kind, one of `KEYS`, in the order of layer, length and sample."""
        return self._kinds.get(kind, [])

    @cached_property
    def _kinds(self) -> dict[str, list[Cells]]:
        kinds: dict[str, list[Cells]] = defaultdict(list)
        known = (row for row in self.rows if row["kind"] in KEYS)
        for row in sorted(known, key=lambda r: (r["layer"], r["n"], r.get("sample", 0), r.get("head", 0))):
            kinds[row["kind"]].append(row)
        return dict(kinds)

    @cached_property
    def layers(self) -> list[int]:
        return sorted({row["layer"] for row in self.of("layer")})

    @cached_property
    def lengths(self) -> list[int]:
        return sorted({row["n"] for row in self.of("layer")})

    @cached_property
    def summary(self) -> list[Cells]:
        """One row per layer and length over its samples: geometric mean, extremes, largest upper end, mean radius."""
        groups: dict[tuple[int, int], list[Cells]] = defaultdict(list)
        for row in self.of("layer"):
            groups[row["layer"], row["n"]].append(row)
        return [_summary(layer, n, rows) for (layer, n), rows in groups.items()]

    def least_smooth(self, layers: Collection[int] | None = None) -> Cells:
        """The row of the summary with the largest mean, among these layers or all."""
        return max((row for row in self.summary if layers is None or row["layer"] in layers), key=lambda row: row["mean"])

    @cached_property
    def growth(self) -> Growth:
        """The rows of layers as a study of growth: the fits, and a table to print."""
        return Growth(tuple(LayerRow.of(row) for row in self.of("layer")))

    @property
    def fits(self) -> dict[int, GrowthFit]:
        """By layer, where two lengths or more have a positive constant."""
        return self.growth.fits

    @cached_property
    def jumps(self) -> list[tuple[int, Break]]:
        """Every jump with its layer, the largest first."""
        jumps = [(layer, b) for layer, fit in self.fits.items() for b in fit.breaks if b.kind == "jump"]
        return sorted(jumps, key=lambda jump: -abs(math.log(jump[1].change.value)))

    @cached_property
    def sink(self) -> Sink | None:
        """The token that carries more than half of the worst direction in many layers, if there is one."""
        carried: dict[int, list[Cells]] = defaultdict(list)
        for row in self.of("held"):
            if row["share"] > _MOST:
                carried[row["token"]].append(row)
        layers = len(self.layers)
        token = max(carried, key=lambda t: len(carried[t]), default=None)
        if token is None or len(carried[token]) < max(min(2, layers), math.ceil(layers / _LAYERS)):
            return None
        return Sink(token, carried[token][0]["word"], carried[token])

    @cached_property
    def maps(self) -> list[Cells]:
        """Maps of the layers side by side: the one asked for, on the first sample at the longest length, and others."""
        n = self.lengths[-1]
        first: dict[int, Cells] = {}
        for row in self.of("layer"):
            if row["n"] == n and row.get("relative") is not None:
                first.setdefault(row["layer"], row)
        asked = [row | {"map": self.methods.map} for row in first.values()]
        rows = [{key: row[key] for key in KEYS["map"]} for row in asked + self.of("map")]
        order = (*SIDE_BY_SIDE, self.methods.map)
        return sorted(rows, key=lambda row: order.index(row["map"]) if row["map"] in order else len(order))

    @cached_property
    def variants(self) -> list[Cells]:
        """One row per layer, length, size of tokens, kind of attention and way to put it in, over its samples."""
        groups: dict[tuple[str, str, int, int, float], list[Cells]] = defaultdict(list)
        order = {name: k for k, name in enumerate(KINDS)}
        for row in sorted(self.of("variant"), key=lambda row: (order.get(row["variant"], len(order)), row["way"] == "matched")):
            groups[row["variant"], row["way"], row["layer"], row["n"], row["factor"]].append(row)
        return [_variant(place, rows) for place, rows in groups.items()]

    @cached_property
    def bounds(self) -> list[Cells]:
        """One row per bound, beside the `value` measured there."""
        return [
            {name: part for name, part in row.items() if name in ("model", "layer", "map", "n", "value", "radius_max")} | bound
            for row in self.of("bounds")
            for bound in row["bounds"]
        ]

    @cached_property
    def shares(self) -> dict[int, dict[int, Sequence[float]]]:
        """By length, then by layer: each token's share of the direction stretched most, on the first sample."""
        shares: dict[int, dict[int, Sequence[float]]] = defaultdict(dict)
        for row in self.of("layer"):
            if "shares" in row:
                shares[row["n"]].setdefault(row["layer"], row["shares"])
        return dict(sorted(shares.items()))


def _variant(place: tuple[str, str, int, int, float], rows: list[Cells]) -> Cells:
    values, about = [row["value"] for row in rows], dict(zip(("variant", "way", "layer", "n", "factor"), place, strict=True))
    relative = [row["relative"] for row in rows if row["relative"] is not None]
    return about | {
        "mean": mean(values),
        "low": min(values),
        "high": max(values),
        "upper": max(row["upper"] for row in rows),
        "relative": mean(relative) if relative else None,
        "entropy": rows[0]["entropy"],
        "matched": rows[0]["matched"],
        "cost": rows[0]["cost"],
        "steps": math.fsum(row["steps"] for row in rows) / len(rows),
        "samples": len(rows),
    }


def _summary(layer: int, n: int, rows: list[Cells]) -> Cells:
    values = [row["value"] for row in rows]
    return {
        "layer": layer,
        "n": n,
        "mean": geometric_mean(values) if min(values) > 0 else 0.0,
        "low": min(values),
        "high": max(values),
        "upper": max(row["upper"] for row in rows),
        "radius": math.fsum(row["radius"] for row in rows) / len(rows),
        "samples": len(rows),
    }
