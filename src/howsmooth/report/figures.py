"""Figures for a paper, from the same data as the page: vector output, colour-blind safe."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from howsmooth.errors import BadInputError, ResultsError
from howsmooth.report.data import BoundRow, ReportData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe & Ito's palette, told apart by colour-blind readers
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "osD^vPX*"
FORMATS = ("pdf", "png", "svg")
_DECADES = 7  # a bound further off is an arrow at the edge

_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "none",
    "savefig.dpi": 200,
}


def draw_figures(data: ReportData, folder: str | Path, *, formats: Sequence[str] = ("pdf", "png")) -> list[Path]:
    """Every figure the data allows, in every format, into `folder`."""
    wrong = [f for f in formats if f not in FORMATS]
    if wrong:
        raise BadInputError(f"expected formats among {', '.join(FORMATS)}, got {wrong[0]!r}; choose from these")
    folder, written = Path(folder), []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _style():
            for name, (there, draw) in FIGURES.items():
                if not there(data):
                    continue
                figure = draw(data)
                for ending in formats:
                    written.append(folder / f"{name}.{ending}")
                    figure.savefig(written[-1])
    except OSError as error:
        raise ResultsError(f"expected a folder that can be written, got {folder} ({error.strerror}); choose another") from None
    return written


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def heat_map(data: ReportData) -> "Figure":
    """L by layer and length."""
    lookup = {(c.layer, c.n): c.mean for c in data.cells}
    table = [[lookup.get((layer, n), math.nan) for n in data.lengths] for layer in data.layers]
    return _heat(table, [str(n) for n in data.lengths], data.layers, "n, tokens", "L by layer and length")


def heads(data: ReportData) -> "Figure":
    """L of every head alone, at the longest length where heads were measured."""
    n = max(h.n for h in data.heads)
    lookup = {(h.layer, h.head): h.value for h in data.heads if h.n == n}
    rows, columns = sorted({k[0] for k in lookup}), sorted({k[1] for k in lookup})
    table = [[lookup.get((layer, head), math.nan) for head in columns] for layer in rows]
    return _heat(table, [str(h) for h in columns], rows, "head", f"L of every head alone, n = {n}")


def _heat(table: list[list[float]], columns: list[str], rows: Sequence[int], label: str, title: str) -> "Figure":
    from matplotlib.colors import LogNorm

    values = [v for row in table for v in row if v > 0]
    low, high = (min(values), max(values)) if values else (1.0, 2.0)
    figure, axes = _axes(1.6 + 0.36 * len(columns), 1.1 + 0.22 * len(rows))
    image = axes.imshow(table, cmap="cividis", norm=LogNorm(low, max(high, low * 1.001)), aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), [f"layer {r}" for r in rows])
    axes.tick_params(length=0)
    axes.set_xlabel(label)
    axes.set_title(title, loc="left")
    for i, row in enumerate(table):
        for j, v in enumerate(row):
            if v > 0 and len(columns) <= 24:
                dark = math.log(v / low) < 0.5 * (math.log(high / low) or 1)
                axes.text(j, i, f"{v:.3g}", ha="center", va="center", fontsize=6, color="white" if dark else "black")
    bar = figure.colorbar(image, ax=axes, label="L (log scale)", pad=0.02)
    _plain_numbers(bar.ax.yaxis)
    return figure


def growth(data: ReportData) -> "Figure":
    """L against n with the fits, and what one power law leaves over."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 5.0), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, 1])
    for i, (layer, fit) in enumerate(data.fits.items()):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        sure = "" if fit.exponent.low is None else f" [{fit.exponent.low:.2f}, {fit.exponent.high:.2f}]"
        label = f"layer {layer}: $n^{{{fit.exponent.value:.2f}}}${sure}"
        top.fill_between(fit.lengths, fit.lows, fit.highs, color=colour, alpha=0.12, lw=0)
        top.plot(fit.lengths, fit.means, marker, color=colour, label=label)
        top.plot(fit.lengths, fit.fitted_apart, "-", color=colour, lw=0.9)
        bottom.plot(fit.lengths, fit.residuals, marker=marker, color=colour, lw=0.9)
        for b in (b for b in fit.breaks if b.kind == "jump"):
            for axes in (top, bottom):
                axes.axvspan(b.before, b.after, color=colour, alpha=0.2, lw=0)
            at = fit.means[fit.lengths.index(b.after)]
            note = f"layer {layer}: ×{b.change.value:.2f}"
            top.annotate(note, (b.after, at), (4, -10), textcoords="offset points", fontsize=7, color=colour)
    _guides(top, data)
    top.set(xscale="log", yscale="log", ylabel="L")
    bottom.set(xscale="log", yscale="log", ylabel="L / power law", xlabel="n, tokens")
    bottom.axhline(1, color="0.6", lw=0.7, zorder=0)
    _lengths(bottom, data)
    for axes in (top, bottom):
        _plain_numbers(axes.yaxis)
    top.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    top.set_title("Growth with the length, exponents with 95 % intervals", loc="left")
    return figure


def _lengths(axes: Any, data: ReportData) -> None:
    ticks = [n for n in data.lengths if math.log2(n).is_integer()] or data.lengths
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.xaxis.minorticks_off()


def _plain_numbers(axis: Any) -> None:
    """2, 5, 10 instead of powers of ten, a handful of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 3, 5, 7)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _guides(axes: Any, data: ReportData) -> None:
    first, last = data.lengths[0], data.lengths[-1]
    start = min(c.mean for c in data.cells if c.mean > 0)
    for power, name, style in ((0.25, "1/4", ":"), (0.5, "1/2", "-.")):
        axes.plot([first, last], [start, start * (last / first) ** power], style, color="0.5", lw=0.9, label=f"$n^{{{name}}}$")


def radius(data: ReportData) -> "Figure":
    """R, the root mean square norm of the tokens, against n."""
    figure, axes = _axes(4.6, 2.8)
    for i, layer in enumerate(data.layers):
        points = [(c.n, c.radius) for c in data.cells if c.layer == layer]
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        axes.plot(*zip(*points, strict=True), label=f"layer {layer}", **style)
    axes.set(xscale="log", xlabel="n, tokens", ylabel="R, root mean square norm")
    _lengths(axes, data)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title("Size of the tokens", loc="left")
    return figure


def bound_ladder(data: ReportData) -> "Figure":
    """For the least smooth layer that has bounds, each bound beside what was measured."""
    there = {b.layer for b in data.bounds}
    layer = max((c for c in data.cells if c.layer in there), key=lambda c: c.mean).layer
    n = max(b.n for b in data.bounds if b.layer == layer)
    rows = sorted((b for b in data.bounds if (b.layer, b.n) == (layer, n) and b.log_value is not None), key=_log)
    measured = rows[0].measured
    edge = max(math.log10(measured) if measured > 0 else 0.0, _log(rows[0])) + _DECADES
    figure, axes = _axes(5.6, 1.1 + 0.2 * len(rows))
    for i, b in enumerate(rows):
        colour, style = (COLOURS[0], "at this input") if b.where == "point" else (COLOURS[1], "over the ball")
        off = _log(b) > edge
        marker = ">" if off else "o" if b.side == "upper" else "s"
        label = f"{style}{'' if b.side == 'upper' else ', from below'}"
        axes.plot(
            10 ** min(_log(b), edge), i, marker, color=colour, fillstyle="full" if b.side == "upper" else "none", label=label
        )
        if off:
            axes.annotate(f"$10^{{{_log(b):.0f}}}$", (10**edge, i), (-22, -3), textcoords="offset points", fontsize=7)
    if measured > 0:
        axes.axvline(measured, color="black", lw=1, label="measured")
    axes.set(xscale="log", xlabel="L", ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), [f"{b.id}: {b.name}" for b in rows])
    axes.minorticks_off()
    handles, names = axes.get_legend_handles_labels()
    once = dict(zip(names, handles, strict=True))
    axes.legend(once.values(), once, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title(f"Bounds of layer {layer} at n = {n}", loc="left")
    return figure


def _log(bound: BoundRow) -> float:
    assert bound.log_value is not None
    return bound.log_value / math.log(10)


def worst_inputs(data: ReportData) -> "Figure":
    """The text, the worst input found and the ceiling, layer by layer."""
    figure, axes = _axes(4.8, 0.9 + 0.22 * len(data.worst))
    for i, w in enumerate(data.worst):
        axes.plot([w.text, w.worst], [i, i], "-", color="0.8", zorder=0)
    columns = {
        "the text": ([w.text for w in data.worst], "o", COLOURS[0]),
        "worst found": ([w.worst for w in data.worst], "D", COLOURS[1]),
    }
    ceilings = [
        (math.exp(w.log_ceiling), i) for i, w in enumerate(data.worst) if w.log_ceiling is not None and w.log_ceiling < 600
    ]
    for name, (values, marker, colour) in columns.items():
        axes.plot(values, range(len(values)), marker, color=colour, label=name)
    if ceilings:
        axes.plot(*zip(*ceilings, strict=True), "|", color="black", markersize=7, label="ceiling")
    axes.set(xscale="log", ylim=(len(data.worst) - 0.5, -0.5))
    axes.set_yticks(range(len(data.worst)), [f"layer {w.layer}, n = {w.n}" for w in data.worst])
    axes.set_xlabel("L")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title("Worst inputs", loc="left")
    return figure


def _axes(width: float, height: float) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(width, 9.0), min(height, 9.0)), layout="constrained")
    return figure, figure.subplots()


FIGURES: dict[str, tuple[Callable[[ReportData], bool], Callable[[ReportData], "Figure"]]] = {
    "layers-by-length": (lambda data: True, heat_map),
    "growth": (lambda data: bool(data.fits), growth),
    "radius": (lambda data: len(data.lengths) > 1, radius),
    "layers-by-heads": (lambda data: bool(data.heads), heads),
    "bound-ladder": (lambda data: any(b.log_value is not None for b in data.bounds), bound_ladder),
    "worst-inputs": (lambda data: bool(data.worst), worst_inputs),
}
