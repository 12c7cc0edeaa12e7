"""Figures for a paper, from the same data as the page: vector output, colour-blind safe, readable for many layers."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from howsmooth.errors import BadInputError
from howsmooth.report.data import ReportData
from howsmooth.run import writing
from howsmooth.study.question import mean

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from matplotlib.figure import Figure

# Okabe & Ito's palette, told apart by colour-blind readers
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "osD^vPX*"
FORMATS = ("pdf", "png", "svg")
_DECADES = 7  # a bound further off is an arrow at the edge
_NAMED = 36  # rows of a chart that have room for a name each, and for numbers
_FAINT = 1e-4  # of the largest norm of a picture; smaller ones are drawn as this
_NOTES = 6  # jumps that are named; more notes would cover each other
_BESIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}

_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
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
    written = []
    with figure_style():
        for name, draw in [(name, draw) for name, (there, draw) in FIGURES.items() if there(data)]:
            figure = draw(data)
            for ending in formats:
                written.append(Path(folder) / f"{name}.{ending}")
                with writing(written[-1], parents=True) as part:
                    figure.savefig(part)
    return written


def figure_style() -> "AbstractContextManager[None]":
    """The look of every figure, inside a `with`; global settings are left alone."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def plain_numbers(axis: Any) -> None:
    """2, 5, 10 instead of powers of ten, a handful of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 3, 5, 7)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def heat_map(data: ReportData) -> "Figure":
    """L by layer and length."""
    values = {(row["layer"], row["n"]): row["mean"] for row in data.summary}
    return _heat(values, "n, tokens", "L by layer and length")


def heads(data: ReportData) -> "Figure":
    """L of every head alone, at the longest length where heads were measured."""
    n = max(row["n"] for row in data.of("head"))
    values = {(row["layer"], row["head"]): row["value"] for row in data.of("head") if row["n"] == n}
    return _heat(values, "head", f"L of every head alone, n = {n}")


def _heat(values: dict[tuple[int, int], float], label: str, title: str) -> "Figure":
    """values: by layer and column."""
    from matplotlib.colors import LogNorm

    rows, columns = (sorted({key[i] for key in values}) for i in (0, 1))
    table = [[values.get((layer, column), math.nan) for column in columns] for layer in rows]
    positive = [v for v in values.values() if v > 0] or [1.0, 2.0]
    low, high = min(positive), max(positive)
    figure, axes = _axes(1.6 + 0.36 * len(columns), 1.1 + 0.22 * len(rows))
    image = axes.imshow(table, cmap="cividis", norm=LogNorm(low, max(high, low * 1.001)), aspect="auto")
    _name(axes.xaxis, [str(column) for column in columns], 24)
    _name(axes.yaxis, [f"layer {layer}" for layer in rows])
    axes.tick_params(length=0)
    axes.set(xlabel=label, title=title)
    for i, row in enumerate(table):
        for j, v in enumerate(row):
            if v > 0 and len(columns) <= 24 and len(rows) <= _NAMED:
                dark = math.log(v / low) < 0.5 * (math.log(high / low) or 1)
                axes.text(j, i, f"{v:.3g}", ha="center", va="center", fontsize=6, color="white" if dark else "black")
    plain_numbers(figure.colorbar(image, ax=axes, label="L (log scale)", pad=0.02).ax.yaxis)
    return figure


def growth(data: ReportData) -> "Figure":
    """L against n with the fits, and what one power law leaves over; exponents in the legend, or by layer where many."""
    looks, many = _looks(data), len(data.layers) > len(COLOURS)
    figure, (top, bottom, *rest) = _axes(5.4, 7.0 if many else 5.0, 2 + many, height_ratios=[2.2, 1, 1][: 2 + many])
    for layer, fit in data.fits.items():
        look, (value, low, high) = looks[layer], (fit.exponent.value, fit.exponent.low, fit.exponent.high)
        ends = "" if low is None else f" [{low:.2f}, {high:.2f}]"
        top.fill_between(fit.lengths, fit.lows, fit.highs, color=look["color"], alpha=0.04 if many else 0.12, lw=0)
        top.plot(fit.lengths, fit.means, **look, ls="", label=f"layer {layer}: $n^{{{value:.2f}}}${ends}")
        top.plot(fit.lengths, fit.fitted_apart, "-", color=look["color"], lw=0.9)
        bottom.plot(fit.lengths, fit.residuals, **look, lw=0.9)
        for axes in rest:
            axes.plot([layer, layer], [value if end is None else end for end in (low, high)], color=look["color"])
            axes.plot(layer, value, **look)
    for layer, jump in data.jumps[:_NOTES]:
        fit, colour = data.fits[layer], looks[layer]["color"]
        for axes in (top, bottom):
            axes.axvspan(jump.before, jump.after, color=colour, alpha=0.2, lw=0)
        note, at = f"layer {layer}: ×{jump.change.value:.2f}", (jump.after, fit.means[fit.lengths.index(jump.after)])
        top.annotate(note, at, (4, -10), textcoords="offset points", fontsize=7, color=colour)
    first, last = data.lengths[0], data.lengths[-1]
    start = min(row["mean"] for row in data.summary if row["mean"] > 0)
    for power, name, style in ((0.25, "1/4", ":"), (0.5, "1/2", "-.")):
        top.plot([first, last], [start, start * (last / first) ** power], style, color="0.5", lw=0.9, label=f"$n^{{{name}}}$")
    top.set(yscale="log", ylabel="L", title="Growth with the length, exponents with 95 % intervals")
    bottom.set(yscale="log", ylabel="L / power law", xlabel="n, tokens")
    bottom.axhline(1, color="0.6", lw=0.7, zorder=0)
    for axes in (top, bottom):
        _lengths(axes, data)
        plain_numbers(axes.yaxis)
    top.tick_params(labelbottom=False)
    for axes in rest:
        axes.set(xlabel="layer", ylabel="exponent")
    handles, names = top.get_legend_handles_labels()
    top.legend(handles[-2:] if many else handles, names[-2:] if many else names, **({"loc": "upper left"} if many else _BESIDE))
    return figure


def radius(data: ReportData) -> "Figure":
    """R, the root mean square norm of the tokens, against n."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    figure, axes = _axes(4.6, 2.8)
    for layer, look in _looks(data).items():
        points = [(row["n"], row["radius"]) for row in data.summary if row["layer"] == layer]
        axes.plot(*zip(*points, strict=True), label=f"layer {layer}", **look)
    _lengths(axes, data)
    axes.set(xlabel="n, tokens", ylabel="R, root mean square norm", title="Size of the tokens")
    if len(data.layers) <= len(COLOURS):
        axes.legend(**_BESIDE)
    else:
        ends = Normalize(data.layers[0], data.layers[-1])
        figure.colorbar(ScalarMappable(ends, "viridis"), ax=axes, label="layer", pad=0.02)
    return figure


def bound_ladder(data: ReportData) -> "Figure":
    """For the least smooth layer that has bounds, each bound beside what was measured."""
    layer = data.least_smooth({bound["layer"] for bound in data.bounds})["layer"]
    n = max(bound["n"] for bound in data.bounds if bound["layer"] == layer)
    rows = [bound for bound in data.bounds if (bound["layer"], bound["n"]) == (layer, n) and bound["log_value"] is not None]
    rows.sort(key=lambda bound: bound["log_value"])
    powers, measured = [bound["log_value"] / math.log(10) for bound in rows], rows[0]["value"]
    edge = max(math.log10(measured) if measured > 0 else 0.0, powers[0]) + _DECADES
    figure, axes = _ladder([f"{bound['id']}: {bound['name']}" for bound in rows], f"Bounds of layer {layer} at n = {n}")
    for i, (bound, power) in enumerate(zip(rows, powers, strict=True)):
        colour, where = (COLOURS[0], "at this input") if bound["where"] == "point" else (COLOURS[1], "over the ball")
        marker, fill, side = ("o", "full", "") if bound["side"] == "upper" else ("s", "none", ", from below")
        marker = ">" if power > edge else marker
        axes.plot(10 ** min(power, edge), i, marker, color=colour, fillstyle=fill, label=where + side)
        if power > edge:
            axes.annotate(f"$10^{{{power:.0f}}}$", (10**edge, i), (-22, -3), textcoords="offset points", fontsize=7)
    if measured > 0:
        axes.axvline(measured, color="black", lw=1, label="measured")
    handles, names = axes.get_legend_handles_labels()
    once = dict(zip(names, handles, strict=True))
    axes.legend(once.values(), once, **_BESIDE)
    return figure


def worst_inputs(data: ReportData) -> "Figure":
    """The text, the worst input found and the ceiling, layer by layer."""
    rows = data.of("worst")
    figure, axes = _ladder([f"layer {row['layer']}, n = {row['n']}" for row in rows], "Worst inputs")
    for i, row in enumerate(rows):
        axes.plot([row["text"], row["value"]], [i, i], "-", color="0.8", zorder=0)
    axes.plot([row["text"] for row in rows], range(len(rows)), "o", color=COLOURS[0], label="the text")
    axes.plot([row["value"] for row in rows], range(len(rows)), "D", color=COLOURS[1], label="worst found")
    logs = [math.inf if row["log_ceiling"] is None else row["log_ceiling"] for row in rows]
    ceilings = [(math.exp(log), i) for i, log in enumerate(logs) if log < 600]  # exp overflows a little further on
    if ceilings:
        axes.plot(*zip(*ceilings, strict=True), "|", color="black", markersize=7, label="ceiling")
    axes.legend(**_BESIDE)
    return figure


def held(data: ReportData) -> "Figure":
    """Above, the largest share of one token in every layer; below, L where that token may move and where it is held fixed."""
    rows = data.of("held")
    figure, (top, bottom) = _axes(5.4, 3.8, 2, height_ratios=[1, 2], sharex=True)
    layers = [row["layer"] for row in rows]
    top.bar(layers, [row["share"] for row in rows], color=COLOURS[1], width=0.8)
    top.set(ylim=(0, 1), ylabel="share", title=f"What one token carries, n = {rows[0]['n']}")
    curves = {"all may move": "whole", "held fixed": "value"}
    _by_layer(bottom, {name: [(row["layer"], row[key]) for row in rows] for name, key in curves.items()})
    bottom.set(ylabel="L")
    return figure


def maps(data: ReportData) -> "Figure":
    """L of attention, normed attention and block, layer by layer, and the same relative to input and output."""
    figure, (top, bottom) = _axes(5.4, 4.6, 2, sharex=True)
    names = dict.fromkeys(row["map"] for row in data.maps)
    for axes, key in ((top, "value"), (bottom, "relative")):
        _by_layer(axes, {name: [(r["layer"], r[key]) for r in data.maps if r["map"] == name] for name in names})
    top.set(ylabel="L", xlabel="", title=f"Maps of each layer, n = {data.maps[0]['n']}")
    bottom.set(ylabel="L·|x| / |f(x)|")
    return figure


def near(data: ReportData) -> "Figure":
    """L at the text, and what is attained and certified within each radius, layer by layer."""
    rows = data.of("near")
    radii = rows[0]["within"]
    figure, panels = _axes(5.4, 1.2 + 1.8 * len(radii), len(radii), sharex=True, squeeze=False)
    for k, (share, axes) in enumerate(zip(radii, panels[:, 0], strict=True)):
        curves = {"at the text": [(r["layer"], r["value"]) for r in rows]}
        curves |= {
            name: [(r["layer"], r[ends][k]) for r in rows]
            for name, ends in (("attained", "lower_ends"), ("certified", "upper_ends"))
        }
        _by_layer(axes, curves)
        axes.set(ylabel="L", xlabel="layer" if share == radii[-1] else "", title=f"within {share:g} |x|, n = {rows[0]['n']}")
    return figure


def radii(data: ReportData) -> "Figure":
    """Certified radius, first order and attack by layer, one curve for every input."""
    rows = data.of("change")
    figure, axes = _axes(5.4, 3.4)
    for k, (name, key) in enumerate((("certified", "certified"), ("first order", "first_order"), ("attack", "attacked"))):
        for sample in sorted({row["sample"] for row in rows}):
            own = [(r["layer"], r[key] / r["size"]) for r in rows if r["sample"] == sample and r[key]]
            label = name if sample == rows[0]["sample"] else None
            axes.plot(*zip(*own, strict=True), color=COLOURS[k], marker=MARKERS[k], lw=0.9, label=label) if own else None
    title = f"Radii within which the output moves by at most {100 * rows[0]['change']:g} %, n = {rows[0]['n']}"
    axes.set(yscale="log", xlabel="layer", ylabel="r / |x|", title=title)
    axes.legend(**_BESIDE)
    return figure


def influence(data: ReportData) -> "Figure":
    """The norm of the derivative of every output token by every input token."""
    from matplotlib.colors import LogNorm

    row = data.of("influence")[0]
    norms = [[value if value > 0 else math.nan for value in line] for line in row["norms"]]
    high = max((v for line in norms for v in line if v == v), default=1.0)
    low = min((v for line in norms for v in line if v == v), default=high)
    figure, axes = _axes(5.0, 4.4)
    scale = LogNorm(max(low, high * _FAINT) * 0.999, high, clip=True)
    image = axes.imshow(norms, cmap="cividis", norm=scale, interpolation="nearest")
    axes.set(xlabel="input token", ylabel="output token", title=f"From token to token, layer {row['layer']}, n = {row['n']}")
    figure.colorbar(image, ax=axes, label="norm of the derivative", pad=0.02)
    return figure


def variants(data: ReportData) -> "Figure":
    """Kinds of attention at equal entropy, means over layers: L against n, against the size of the tokens, against cost."""
    from matplotlib.figure import Figure

    rows = [row for row in data.variants if row["mean"] > 0]
    scaled = {row["variant"] for row in rows if row["way"] != "published"}  # the others have one way to be put in
    rows = [row for row in rows if row["way"] != "published" or row["variant"] not in scaled]
    last, moved = max(row["n"] for row in rows), next((row["n"] for row in rows if row["factor"] != 1), None)
    charts = [("n", "n, tokens", [r for r in rows if r["factor"] == 1])]
    charts += [("factor", f"tokens multiplied by, n = {moved}", [r for r in rows if r["n"] == moved])] if moved else []
    charts += [("cost", f"cost, softmax = 1, n = {last}", [r for r in rows if (r["n"], r["factor"]) == (last, 1)])]
    figure = Figure(figsize=(2.8 * len(charts), 2.9), layout="constrained")
    panels = figure.subplots(1, len(charts), sharey=True)
    for axes, (key, label, some) in zip(panels, charts, strict=True):
        for k, name in enumerate(dict.fromkeys(row["variant"] for row in rows)):
            own = [row for row in some if row["variant"] == name]
            points = {x: mean([r["mean"] for r in own if r[key] == x]) for x in sorted({r[key] for r in own})}
            if key == "cost" and own:
                points = {mean([r["cost"] for r in own]): mean([r["mean"] for r in own])}
            look = {"color": COLOURS[k % len(COLOURS)], "marker": MARKERS[k % len(MARKERS)]}
            axes.plot(list(points), list(points.values()), **look, label=name, ls="" if key == "cost" else "-")
        axes.set(xscale="log", yscale="log", xlabel=label)
        plain_numbers(axes.yaxis)
        if key == "cost":
            plain_numbers(axes.xaxis)
        else:
            ticks = sorted({row[key] for row in some})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.xaxis.minorticks_off()
    panels[0].set(ylabel="L", title="Kinds of attention at equal entropy")
    panels[-1].legend(**_BESIDE)
    return figure


def _by_layer(axes: Any, curves: dict[str, list[tuple[int, float | None]]]) -> None:
    """Positive values over the layers on a logarithmic axis, one curve for each name."""
    from matplotlib.ticker import MaxNLocator

    for k, (name, points) in enumerate(curves.items()):
        there = [(layer, value) for layer, value in points if value is not None and 0 < value < math.inf]
        axes.plot(*(zip(*sorted(there), strict=True) if there else ((), ())), color=COLOURS[k], marker=MARKERS[k], label=name)
    axes.set(yscale="log", xlabel="layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if any(line.get_xdata().size for line in axes.lines):
        plain_numbers(axes.yaxis)
    axes.legend(**_BESIDE)


def _axes(width: float, height: float, panels: int = 1, **options: Any) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(width, 9.0), min(height, 9.0)), layout="constrained")
    return figure, figure.subplots(panels, 1, **options)


def _ladder(names: list[str], title: str) -> tuple["Figure", Any]:
    """A chart with one row for each name, along a logarithmic axis."""
    figure, axes = _axes(5.6, 1.0 + 0.22 * len(names))
    axes.set(xscale="log", xlabel="L", title=title, ylim=(len(names) - 0.5, -0.5))
    _name(axes.yaxis, names)
    axes.minorticks_off()
    return figure, axes


def _name(axis: Any, names: list[str], most: int = _NAMED) -> None:
    """Names along an axis, all or every second, third … where there are many."""
    step = math.ceil(len(names) / most)
    axis.set_ticks(range(0, len(names), step), names[::step])


def _looks(data: ReportData) -> dict[int, dict[str, Any]]:
    """A colour and a marker for every layer; where there are many, colours go from the first layer to the last."""
    import matplotlib

    if len(data.layers) <= len(COLOURS):
        return {layer: {"color": COLOURS[i], "marker": MARKERS[i]} for i, layer in enumerate(data.layers)}
    shades = matplotlib.colormaps["viridis"].resampled(len(data.layers))
    return {layer: {"color": shades(i), "marker": "o"} for i, layer in enumerate(data.layers)}


def _lengths(axes: Any, data: ReportData) -> None:
    ticks = [n for n in data.lengths if math.log2(n).is_integer()] or data.lengths
    axes.set_xscale("log")
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.xaxis.minorticks_off()


FIGURES: dict[str, tuple[Callable[[ReportData], bool], Callable[[ReportData], "Figure"]]] = {
    "layers-by-length": (lambda data: True, heat_map),
    "growth": (lambda data: bool(data.fits), growth),
    "radius": (lambda data: len(data.lengths) > 1, radius),
    "layers-by-heads": (lambda data: bool(data.of("head")), heads),
    "bound-ladder": (lambda data: any(bound["log_value"] is not None for bound in data.bounds), bound_ladder),
    "worst-inputs": (lambda data: bool(data.of("worst")), worst_inputs),
    "held": (lambda data: bool(data.of("held")), held),
    "maps": (lambda data: bool(data.maps), maps),
    "near": (lambda data: bool(data.of("near")), near),
    "radii": (lambda data: bool(data.of("change")), radii),
    "influence": (lambda data: bool(data.of("influence")), influence),
    "variants": (lambda data: any(row["mean"] > 0 for row in data.variants), variants),
}
