"""Figures of the reproduction: the paper's curves measured again, each as PDF and PNG."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from howsmooth.errors import ResultsError
from howsmooth.paper.curves import Curve, Exponent, curves, exponents
from howsmooth.paper.meanfield import BOUNDS, Convergence, Growth
from howsmooth.paper.meanfield_figures import draw_convergence, draw_frequency, draw_growth, draw_map
from howsmooth.paper.splitting_maps import Share, splitting_map
from howsmooth.report import COLOURS, MARKERS, figure_style, plain_numbers
from howsmooth.study.fit import GrowthFit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
L_COLOUR, SCRIPTS_COLOUR = COLOURS[0], COLOURS[1]


def draw_reproduction(rows: Rows, folder: Path) -> list[Path]:
    """Every figure that the rows allow, as PDF and PNG; the PNGs' paths, in the order of the page."""
    found = curves(rows)
    drawings: dict[str, Callable[[], Figure | None]] = {
        "real": lambda: growth([c for c in found if c.study == "real"], "On text"),
        "random": lambda: growth([c for c in found if c.study == "random"], "Random weights"),
        "adversarial": lambda: adversarial([c for c in found if c.study == "adversarial"]),
        "trap": lambda: trap([c for c in found if c.study in ("real", "random", "trap")]),
        "iteration": lambda: iteration([r for r in rows if r.get("study") == "iteration"]),
        "exponents": lambda: exponent_chart(exponents(found)),
    }
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with figure_style():
            for name, draw in drawings.items():
                figure = draw()
                if figure is not None:
                    figure.savefig(folder / f"{name}.pdf")
                    figure.savefig(folder / f"{name}.png", dpi=160)
                    written.append(folder / f"{name}.png")
        written += [path for path in _of_measures(rows, folder) if path.suffix == ".png"]
    except OSError as error:
        raise ResultsError(f"expected a folder that can be written, got {folder} ({error.strerror}); choose another") from None
    return written


def growth(found: Sequence[Curve], title: str) -> "Figure | None":
    """L against n, a panel for each subject and mask with a curve for each layer, and R below."""
    groups: dict[str, list[Curve]] = {}
    for c in found:
        groups.setdefault(f"{c.subject}, {c.masking}", []).append(c)
    if not groups:
        return None
    figure = _figure(2.9 * len(groups) + 0.2, 4.0)
    axes = figure.subplots(2, len(groups), squeeze=False, sharex="col", sharey="row", height_ratios=[2.6, 1])
    for column, (name, group) in enumerate(groups.items()):
        top, bottom = axes[0][column], axes[1][column]
        for i, c in enumerate(group):
            colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
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
        bottom.set_ylim(0, 1.15 * max(c.radius(n) for c in found for n in c.lengths))
        _lengths(bottom, {n for c in group for n in c.lengths})
    figure.suptitle(f"{title}: lines and exponents are fitted up to n = 98", x=0.01, ha="left", fontsize=9)
    return figure


def adversarial(found: Sequence[Curve]) -> "Figure | None":
    """Eigenvector tokens with their exponents, and the worst configuration of any kind beside them."""
    if not found:
        return None
    figure = _figure(6.4, 3.6)
    axes = figure.subplots()
    names = list(dict.fromkeys(c.label + (", masked" if c.label == c.subject and c.masking == "masked" else "") for c in found))
    for c in found:
        label = c.label + (", masked" if c.label == c.subject and c.masking == "masked" else "")
        i = names.index(label)
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        points = [(p.n, p.value) for p in c.points]
        if c.map == "eigenvector tokens":
            fit = c.fit
            text = label if fit is None else f"{label}: {_power(fit, sure=False)}"
            axes.plot(*zip(*points, strict=True), marker + "-", color=colour, lw=1, ms=2.6, label=text)
        else:
            style = {"fillstyle": "none", "ms": 5, "ls": "none"}
            axes.plot(*zip(*points, strict=True), marker=marker, color=colour, label=f"{label}: worst configuration", **style)
    _guides(axes, found, powers=((0.5, "1/2", "-."),))
    _log(axes, "L")
    axes.set_xlabel("tokens n")
    _lengths(axes, {n for c in found for n in c.lengths})
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title("Adversarial tokens", loc="left")
    return figure


def trap(found: Sequence[Curve]) -> "Figure | None":
    """The constant and what the scripts print, on the same inputs, a panel for each layer."""
    shown = [c for c in found if c.fit is not None and c.scripts_fit is not None]
    if not shown:
        return None
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure = _figure(2.35 * columns, 2.1 * rows + 0.5)
    axes = figure.subplots(rows, columns, squeeze=False)
    for place, c in enumerate(shown):
        panel = axes[place // columns][place % columns]
        assert c.fit is not None
        assert c.scripts_fit is not None
        for fit, colour, marker in ((c.fit, L_COLOUR, "o"), (c.scripts_fit, SCRIPTS_COLOUR, "s")):
            panel.plot(fit.lengths, fit.means, marker, color=colour, ms=1.8, label=_power(fit, sure=False))
            panel.plot(fit.lengths, fit.fitted, "-", color=colour, lw=0.9)
        _log(panel, "")
        _lengths(panel, c.fit.lengths)
        whole = "\nwith residual and norm" if c.study == "trap" else ""
        panel.set_title(f"{c.subject}, {c.masking},\nlayer {c.layer}{whole}", loc="left", fontsize=7)
        panel.legend(fontsize=6, handlelength=1)
    for place in range(len(shown), rows * columns):
        axes[place // columns][place % columns].axis("off")
    handles = [
        axes[0][0].plot([], [], "o-", color=L_COLOUR, ms=3)[0],
        axes[0][0].plot([], [], "s-", color=SCRIPTS_COLOUR, ms=3)[0],
    ]
    names = ["L = ‖J‖₂", "what the public scripts print, √‖Jᵀ f(X)‖"]
    figure.legend(handles, names, loc="outside upper left", ncols=2, fontsize=8)
    figure.supxlabel("tokens n", fontsize=8)
    return figure


def iteration(rows: Rows) -> "Figure | None":
    """The power iteration step by step, from several starts, with either element of what `torch.func.jvp` returns."""
    if not rows:
        return None
    figure = _figure(4.6, 2.7)
    axes = figure.subplots()
    for start in dict.fromkeys(r["start"] for r in rows):
        part = [r for r in rows if r["start"] == start]
        steps = [r["step"] for r in part]
        first = start == rows[0]["start"]
        styles = (
            ("element_0", SCRIPTS_COLOUR, "s-", "jvp(…)[0], the output"),
            ("element_1", L_COLOUR, "o-", "jvp(…)[1], the tangent"),
        )
        for key, colour, style, name in styles:
            axes.plot(steps, [r[key] for r in part], style, color=colour, lw=0.9, label=name if first else None)
    r = rows[0]
    axes.axhline(r["scripts"], color=SCRIPTS_COLOUR, ls=":", lw=1, label="√‖Jᵀ f(X)‖")
    axes.axhline(r["value"], color=L_COLOUR, ls=":", lw=1, label="‖J‖₂")
    axes.set(xlabel="step of the power iteration", ylabel="printed", ylim=(0, None))
    axes.set_title(f"{r['subject']}, {r['masking']}, layer {r['layer']}, n = {r['n']}", loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def exponent_chart(found: Sequence[Exponent]) -> "Figure | None":
    """Exponents of every curve: of L, of what the scripts print, and the paper's where it drew one."""
    if not found:
        return None
    figure = _figure(6.2, 0.9 + 0.19 * len(found))
    axes = figure.subplots()
    for i, e in enumerate(found):
        for value, low, high, colour, marker, shift in (
            (e.exponent, e.low, e.high, L_COLOUR, "o", -0.12),
            (e.scripts, e.scripts_low, e.scripts_high, SCRIPTS_COLOUR, "s", 0.12),
        ):
            if low is not None and high is not None:
                axes.plot([low, high], [i + shift] * 2, "-", color=colour, lw=1)
            axes.plot(value, i + shift, marker, color=colour, ms=3.2)
        if e.printed is not None:
            axes.plot(e.printed, i, "|", color="black", ms=9, mew=1.4)
    for guide in (0, 0.25, 0.5):
        axes.axvline(guide, color="0.8", lw=0.7, zorder=0)
    axes.set(ylim=(len(found) - 0.5, -0.5), xlabel="exponent up to n = 98")
    axes.set_yticks(range(len(found)), [_name(e) for e in found], fontsize=6.5)
    styles = (("o", L_COLOUR, "L"), ("s", SCRIPTS_COLOUR, "the scripts' number"), ("|", "black", "printed in the paper"))
    for marker, colour, name in styles:
        axes.plot([], [], marker, color=colour, label=name, ls="none")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return figure


def _of_measures(rows: Rows, folder: Path) -> list[Path]:
    """Mean-field curves and splitting, drawn as `howsmooth split` draws them."""
    written = []
    measures = [r for r in rows if r.get("study") == "meanfield"]
    worst = [
        Growth(*(r[k] for k in ("alpha", "radius", "value", "split", "x", "y", "log_odds")), bounds={k: r[k] for k in BOUNDS})
        for r in measures
        if r["kind"] == "growth"
    ]
    if worst:
        written += draw_growth(worst, folder)
    fields = ("kind", "n", "seed", "value", "moved", "split", "limit")
    many = [Convergence(*(r[k] for k in fields)) for r in measures if r["kind"] != "growth"]
    if many:
        written += draw_convergence(many, folder)
    split = [r for r in rows if r.get("study") == "splitting"]
    grids = [r for r in split if r["kind"] == "map"]
    if grids:
        # a closed form: the grid is evaluated again, the rows keep what it amounts to
        points = [p for r in grids for p in splitting_map([r["alpha"]], [r["mass"]], r["extent"], r["points"])]
        written += draw_map(points, folder)
    shares = [r for r in split if r["kind"] == "frequency"]
    if shares:
        fields = ("label", "cases", "share", "largest", "median")
        written += draw_frequency([Share(*(r[k] for k in fields)) for r in shares], folder)
    return written


def _name(e: Exponent) -> str:
    what = {"attention": "", "eigenvector tokens": ", eigenvector tokens", "worst configuration": ", worst configuration"}
    return f"{e.subject}, {e.masking}, layer {e.layer}{what.get(e.map, ', with residual and norm')}"


def _power(fit: GrowthFit, sure: bool = True) -> str:
    e = fit.exponent
    ends = "" if e.low is None or e.high is None or not sure else f" [{_two(e.low)}, {_two(e.high)}]"
    return f"$n^{{{_two(e.value)}}}${ends}"


def _two(value: float) -> str:
    """Two digits, without a minus before nought."""
    return f"{round(value, 2) + 0.0:.2f}"


def _guides(axes: Any, group: Sequence[Curve], powers: Any = ((0.25, "1/4", ":"), (0.5, "1/2", "-."))) -> None:
    lengths = sorted({n for c in group for n in c.lengths})
    start = min(p.value for c in group for p in c.points if p.value > 0) * 0.8
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


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
