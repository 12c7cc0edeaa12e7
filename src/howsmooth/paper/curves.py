"""Rows gathered into curves, curves fitted and drawn: both for the constant and for what the scripts print."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, final

from howsmooth.paper.drawing import make_folder, new_figure, save_both
from howsmooth.paper.meanfield import KINDS, draw_convergence, draw_frequency, draw_map, draw_worst_measures, splitting_map
from howsmooth.paper.subjects import LONGEST, short_names
from howsmooth.report import COLOURS, MARKERS, figure_style, plain_numbers
from howsmooth.study import GrowthFit, fit_growth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
L_COLOUR, SCRIPTS_COLOUR = COLOURS[0], COLOURS[1]

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
class Curve:
    """One layer of one subject against the length.

    short: the subject's name in legends.  points: rows with `n`, `sample`, `value` (`L`), `upper`, `scripts` (what the public
    scripts print) and `radius` (`R`).
    """

    study: str
    subject: str
    masking: str
    layer: int
    map: str
    points: tuple[Row, ...]
    short: str

    @property
    def name(self) -> dict[str, Any]:
        """What tells it from others, as columns of a table."""
        return {k: getattr(self, k) for k in ("study", "subject", "masking", "layer", "map")}

    @property
    def label(self) -> str:
        return self.subject if self.subject.startswith("one head") else f"{self.short}, {self.masking}, layer {self.layer}"

    @property
    def lengths(self) -> list[int]:
        return sorted({p["n"] for p in self.points})

    @property
    def printed(self) -> float | None:
        """The exponent drawn on the paper's plot of this curve, where there is one."""
        if self.study == "adversarial":
            return PRINTED_ADVERSARIAL if self.map == "eigenvector tokens" else None
        return PRINTED.get((PurePosixPath(self.subject).name, self.masking, self.layer, self.map))

    def radius(self, n: int) -> float:
        radii = [p["radius"] for p in self.points if p["n"] == n]
        return sum(radii) / len(radii)

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
        return self.fitted("value", 10**9) if self.lengths[-1] > LONGEST else None

    def fitted(self, quantity: str, longest: int = LONGEST) -> GrowthFit | None:
        points = [p for p in self.points if p["n"] <= longest and p[quantity] > 0]
        if len({p["n"] for p in points}) < 2:
            return None
        return fit_growth([p["n"] for p in points], [p[quantity] for p in points], [p["sample"] for p in points])


def curves_of(rows: Iterable[Mapping[str, Any]]) -> list[Curve]:
    """Rows of text, modules and adversarial tokens by layer, in order of appearance; other rows are left out."""
    groups: dict[tuple[str, str, str, int, str], list[Row]] = defaultdict(list)
    for r in rows:
        if r.get("study") in ("real", "random", "trap", "adversarial"):
            groups[r["study"], r["subject"], r["masking"], r["layer"], r["map"]].append(r)
    short = short_names(key[1] for key in groups)
    order = [(key, tuple(sorted(points, key=lambda p: (p["n"], p["sample"])))) for key, points in groups.items()]
    return [Curve(*key, points, short[key[1]]) for key, points in order]


def curve_table(group: Sequence[Curve]) -> list[dict[str, Any]]:
    """A row per curve and length: geometric means over samples and extremes, of L and of the scripts' number, and R."""
    rows = []
    for c in group:
        for n in c.lengths:
            points = [p for p in c.points if p["n"] == n]
            values, scripts = [p["value"] for p in points], [p["scripts"] for p in points]
            measured = {"n": n, "samples": len(points), "L": _mean(values), "L_min": min(values), "L_max": max(values)}
            beside = {"L_upper": max(p["upper"] for p in points), "scripts": _mean(scripts), "R": c.radius(n)}
            rows.append(c.name | measured | beside)
    return [{k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()} for row in rows]


def _mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.prod(v ** (1 / len(values)) for v in values)


def exponents(group: Sequence[Curve]) -> list[dict[str, Any]]:
    """A row for every curve with two lengths or more: exponents with 95 % intervals, of `L` and of what the scripts print.

    exponent, scripts: to n = 98.  tail: of `L` over the upper half of these lengths.  longer: of `L` to the longest.
    printed: on the paper's plot.
    """
    rows = []
    for c in group:
        fit, scripts, longer = c.fit, c.scripts_fit, c.long_fit
        if fit is not None and scripts is not None:
            e, s = fit.exponent, scripts.exponent
            measured = {"shortest": fit.lengths[0], "longest": c.lengths[-1], "samples": fit.samples}
            exponent = {"exponent": e.value, "low": e.low, "high": e.high, "tail": _tail(fit)}
            printed = {"scripts": s.value, "scripts_low": s.low, "scripts_high": s.high}
            beside = {"longer": None if longer is None else longer.exponent.value, "printed": c.printed}
            rows.append(c.name | measured | exponent | printed | beside)
    return rows


def _tail(fit: GrowthFit) -> float | None:
    """The exponent over the upper half of the lengths, where what is small at first no longer bends the curve."""
    points = [(n, mean) for n, mean in zip(fit.lengths, fit.means, strict=True) if 2 * n >= fit.lengths[-1]]
    return fit_growth(*zip(*points, strict=True)).exponent.value if len(points) > 1 else None


def draw_reproduction(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Every figure that the rows allow, as PDF and PNG; the PNGs' paths, in the order of the page."""
    lines = curves_of(rows)

    def of(*studies: str) -> list[Curve]:
        return [c for c in lines if c.study in studies]

    def kinds(*names: str) -> list[Row]:
        return [r for r in rows if r.get("kind") in names]

    figures: dict[str, tuple[Callable[[Any], Figure], Sequence[Any]]] = {
        "real": (growth, of("real")),
        "random": (growth, of("random")),
        "adversarial": (adversarial, of("adversarial")),
        "trap": (trap, [c for c in of("real", "random", "trap") if c.fit is not None and c.scripts_fit is not None]),
        "iteration": (iteration, [r for r in rows if r.get("study") == "iteration"]),
        "exponents": (exponent_chart, exponents(lines)),
    }
    # a closed form: the grid is evaluated again, the rows keep what it amounts to
    points = [p for r in kinds("map") for p in splitting_map([r["alpha"]], [r["mass"]], r["extent"], r["points"])]
    others = {draw_worst_measures: kinds("growth"), draw_frequency: kinds("frequency")}
    others |= {draw_convergence: kinds(*KINDS), draw_map: points}
    make_folder(folder)
    with figure_style():
        written = [path for name, (draw, part) in figures.items() if part for path in save_both(draw(part), folder / name)]
    written += [path for draw, part in others.items() if part for path in draw(part, folder)]
    return [path for path in written if path.suffix == ".png"]


def growth(lines: Sequence[Curve]) -> "Figure":
    """L against n, a panel for each subject and mask with a curve for each layer, and R below."""
    groups: dict[str, list[Curve]] = defaultdict(list)
    for c in lines:
        groups[f"{c.short}, {c.masking}"].append(c)
    title = "On text" if lines[0].study == "real" else "Random weights"
    figure, axes = new_figure(
        2.9 * len(groups) + 0.2, 4.0, 2, len(groups), squeeze=False, sharex="col", sharey="row", height_ratios=[2.6, 1]
    )
    for column, (name, group) in enumerate(groups.items()):
        top, bottom = axes[0][column], axes[1][column]
        for i, c in enumerate(group):
            colour, marker = _look(i)
            fit = c.long_fit or c.fit
            if fit is None or c.fit is None:
                continue
            top.fill_between(fit.lengths, fit.lows, fit.highs, color=colour, alpha=0.15, lw=0)
            top.plot(fit.lengths, fit.means, marker, color=colour, ms=2.2, label=f"layer {c.layer}: {_power(c.fit)}")
            top.plot(c.fit.lengths, c.fit.fitted, "-", color=colour, lw=1.1)
            bottom.plot(c.lengths, [c.radius(n) for n in c.lengths], marker, color=colour, ms=1.8)
        _guides(top, group)
        top.set_title(name, loc="left")
        top.legend(loc="best", handlelength=1.2)
        _log(top, "L" if not column else "")
        bottom.set(xscale="log", xlabel="tokens n", ylabel="R" if not column else "")
        bottom.set_ylim(0, 1.15 * max(c.radius(n) for c in lines for n in c.lengths))
        _lengths(bottom, {n for c in group for n in c.lengths})
    figure.suptitle(f"{title}: lines and exponents are fitted up to n = 98", x=0.01, ha="left", fontsize=9)
    return figure


def adversarial(lines: Sequence[Curve]) -> "Figure":
    """Eigenvector tokens with their exponents, and the worst configuration of any kind beside them."""
    figure, axes = new_figure(6.4, 3.6)
    labels = [c.label + (", masked" if c.label == c.subject and c.masking == "masked" else "") for c in lines]
    for c, label in zip(lines, labels, strict=True):
        colour, marker = _look(list(dict.fromkeys(labels)).index(label))
        points = [(p["n"], p["value"]) for p in c.points]
        if c.map == "eigenvector tokens":
            text = label if c.fit is None else f"{label}: {_power(c.fit, sure=False)}"
            style: dict[str, Any] = {"ls": "-", "lw": 1, "ms": 2.6, "label": text}
        else:
            style = {"ls": "none", "fillstyle": "none", "ms": 5, "label": f"{label}: worst configuration"}
        axes.plot(*zip(*points, strict=True), marker=marker, color=colour, **style)
    _guides(axes, lines, powers=((0.5, "1/2", "-."),))
    _log(axes, "L")
    axes.set_xlabel("tokens n")
    _lengths(axes, {n for c in lines for n in c.lengths})
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title("Adversarial tokens", loc="left")
    return figure


def trap(lines: Sequence[Curve]) -> "Figure":
    """The constant and what the scripts print, on the same inputs, a panel for each layer."""
    columns = min(4, len(lines))
    rows = -(-len(lines) // columns)
    figure, grid = new_figure(2.35 * columns, 2.1 * rows + 0.5, rows, columns, squeeze=False)
    panels = list(grid.flat)
    for panel, c in zip(panels, lines, strict=False):
        for fit, colour, marker in ((c.fit, L_COLOUR, "o"), (c.scripts_fit, SCRIPTS_COLOUR, "s")):
            assert fit is not None
            panel.plot(fit.lengths, fit.means, marker, color=colour, ms=1.8, label=_power(fit, sure=False))
            panel.plot(fit.lengths, fit.fitted, "-", color=colour, lw=0.9)
        _log(panel, "")
        _lengths(panel, [n for n in c.lengths if n <= LONGEST])
        whole = "\nwith residual and norm" if c.study == "trap" else ""
        panel.set_title(f"{c.short}, {c.masking},\nlayer {c.layer}{whole}", loc="left", fontsize=7)
        panel.legend(fontsize=6, handlelength=1)
    for panel in panels[len(lines) :]:
        panel.axis("off")
    handles = [panels[0].plot([], [], s, color=k, ms=3)[0] for s, k in (("o-", L_COLOUR), ("s-", SCRIPTS_COLOUR))]
    names = ["L = ‖J‖₂", "what the public scripts print, √‖Jᵀ f(X)‖"]
    figure.legend(handles, names, loc="outside upper left", ncols=2, fontsize=8)
    figure.supxlabel("tokens n", fontsize=8)
    return figure


def iteration(rows: Sequence[Row]) -> "Figure":
    """The power iteration step by step, from several starts, with either element of what `torch.func.jvp` returns."""
    figure, axes = new_figure(4.6, 2.7)
    for start in dict.fromkeys(r["start"] for r in rows):
        part = [r for r in rows if r["start"] == start]
        for key, colour, style, name in (
            ("element_0", SCRIPTS_COLOUR, "s-", "jvp(…)[0], the output"),
            ("element_1", L_COLOUR, "o-", "jvp(…)[1], the tangent"),
        ):
            label = name if start == rows[0]["start"] else None
            axes.plot([r["step"] for r in part], [r[key] for r in part], style, color=colour, lw=0.9, label=label)
    r = rows[0]
    axes.axhline(r["scripts"], color=SCRIPTS_COLOUR, ls=":", lw=1, label="√‖Jᵀ f(X)‖")
    axes.axhline(r["value"], color=L_COLOUR, ls=":", lw=1, label="‖J‖₂")
    axes.set(xlabel="step of the power iteration", ylabel="printed", ylim=(0, None))
    axes.set_title(f"{r['subject']}, {r['masking']}, layer {r['layer']}, n = {r['n']}", loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def exponent_chart(table: Sequence[Row]) -> "Figure":
    """Exponents of every curve: of L, of what the scripts print, and the paper's where it drew one."""
    figure, axes = new_figure(6.2, 0.9 + 0.19 * len(table))
    for i, e in enumerate(table):
        for value, low, high, colour, marker, shift in (
            (e["exponent"], e["low"], e["high"], L_COLOUR, "o", -0.12),
            (e["scripts"], e["scripts_low"], e["scripts_high"], SCRIPTS_COLOUR, "s", 0.12),
        ):
            if low is not None and high is not None:
                axes.plot([low, high], [i + shift] * 2, "-", color=colour, lw=1)
            axes.plot(value, i + shift, marker, color=colour, ms=3.2)
        if e["printed"] is not None:
            axes.plot(e["printed"], i, "|", color="black", ms=9, mew=1.4)
    for guide in (0, 0.25, 0.5):
        axes.axvline(guide, color="0.8", lw=0.7, zorder=0)
    axes.set(ylim=(len(table) - 0.5, -0.5), xlabel="exponent up to n = 98")
    short = short_names(e["subject"] for e in table)
    axes.set_yticks(range(len(table)), [_name(e, short[e["subject"]]) for e in table], fontsize=6.5)
    styles = (("o", L_COLOUR, "L"), ("s", SCRIPTS_COLOUR, "the scripts' number"), ("|", "black", "printed in the paper"))
    for marker, colour, name in styles:
        axes.plot([], [], marker, color=colour, label=name, ls="none")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return figure


def _look(i: int) -> tuple[str, str]:
    """The colour and marker of curve number i."""
    return COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]


def _name(e: Row, subject: str) -> str:
    what = {"attention": "", "eigenvector tokens": ", eigenvector tokens", "worst configuration": ", worst configuration"}
    return f"{subject}, {e['masking']}, layer {e['layer']}{what.get(e['map'], ', with residual and norm')}"


def _power(fit: GrowthFit, sure: bool = True) -> str:
    e = fit.exponent
    ends = "" if e.low is None or e.high is None or not sure else f" [{_two(e.low)}, {_two(e.high)}]"
    return f"$n^{{{_two(e.value)}}}${ends}"


def _two(value: float) -> str:
    """Two digits, without a minus before nought."""
    return f"{round(value, 2) + 0.0:.2f}"


def _guides(axes: Any, group: Sequence[Curve], powers: Any = ((0.25, "1/4", ":"), (0.5, "1/2", "-."))) -> None:
    lengths = sorted({n for c in group for n in c.lengths})
    start = min(p["value"] for c in group for p in c.points if p["value"] > 0) * 0.8
    for power, name, style in powers:
        ends = [start, start * (lengths[-1] / lengths[0]) ** power]
        axes.plot([lengths[0], lengths[-1]], ends, style, color="0.5", lw=0.9, label=f"$n^{{{name}}}$")


def _log(axes: Any, label: str) -> None:
    axes.set(xscale="log", yscale="log", ylabel=label)
    plain_numbers(axes.yaxis)


def _lengths(axes: Any, lengths: Iterable[int]) -> None:
    lengths = sorted(lengths)
    ticks = [n for n in (2, 5, 10, 20, 50, 100, 200, 500) if lengths[0] <= n <= 1.1 * lengths[-1]]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.xaxis.minorticks_off()
