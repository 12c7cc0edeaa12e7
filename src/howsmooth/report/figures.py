"""Figures for a paper, from the charts of the page: vector output, colour-blind safe, readable for many layers."""

import itertools
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from howsmooth.errors import BadInputError
from howsmooth.report.page import drawings
from howsmooth.run import writing
from howsmooth.study.answers import ReportData
from howsmooth.study.charts import Bars, Chart, Drawing, Heat, Ladder, Lines, Option, Picture, fill
from howsmooth.study.jobs import Cells
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
_NARROW = 34  # letters of a title above a panel beside others
_NOTES = 6  # jumps that are named; more notes would cover each other
_INKS = {"point": COLOURS[0], "hot": COLOURS[1], "ball": COLOURS[4], "ink": COLOURS[6]}
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
        for question, drawing in [(q, drawing) for q, some in drawings(data) for drawing in some if drawing.file]:
            figure = _figure(drawing, question.section.swatches if question.section else ())
            for ending in formats:
                written.append(Path(folder) / f"{drawing.file}.{ending}")
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


def _figure(drawing: Drawing, swatches: tuple[tuple[str, str], ...]) -> "Figure":
    """A drawing as a figure: a panel for every chart, and for every option of a pick that has panels.

    swatches: of the section, how marks look and what they mean.
    """
    from matplotlib.figure import Figure

    options = [[o for o in pick.options if pick.panels or o.value == pick.first] for pick in drawing.picks]
    columns = [pick.column for pick in drawing.picks]
    ways = [dict(zip(columns, way, strict=True)) for way in itertools.product(*options)]
    panels = [_Panel(chart, way) for way in ways for chart in drawing.charts]
    widths, heights = zip(*(_SIZES[type(p.chart)](p) for p in panels), strict=True)
    size = (sum(widths), max(heights)) if drawing.across else (max(widths), sum(heights))
    ratios = {"width_ratios": widths} if drawing.across else {"height_ratios": heights}
    figure = Figure(figsize=(min(size[0], 9.0), min(size[1], 9.0)), layout="constrained")
    shape = (1, len(panels)) if drawing.across else (len(panels), 1)
    places: Any = figure.subplots(*shape, squeeze=False, sharey=drawing.across, gridspec_kw=ratios)
    for k, (axes, panel) in enumerate(zip(places.flat, panels, strict=True)):
        title = panel.fill(panel.chart.title)
        axes.set_title(textwrap.fill(title, _NARROW) if drawing.across else title)
        _DRAWS[type(panel.chart)](axes, panel)
        if isinstance(panel.chart, Lines) and (k == len(panels) - 1 if drawing.across else not k or panel.chart.series is None):
            _name_curves(axes, panel.chart)
        if isinstance(panel.chart, Ladder):
            _legend(axes, swatches, panel.chart.base)
        if k and drawing.across:
            axes.set_ylabel("")
    return figure


class _Panel:
    """A chart with what is picked of it."""

    def __init__(self, chart: Any, way: Mapping[str, Option]):
        self.chart, self.picked = chart, {column: option.value for column, option in way.items()}
        self.rows: list[Cells] = chart.shown(self.picked)
        said = {column: option.said or option.value for column, option in way.items()}
        self.words = (self.rows[0] if self.rows else {}) | said

    def fill(self, template: str) -> str:
        """A template with what is picked."""
        return fill(template, self.words)


def _lines(axes: Any, panel: _Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    chart: Lines = panel.chart
    y, looks = panel.picked.get("y", chart.y), dict[Any, _Look]()
    if chart.series is None:
        named = [
            (name, column, _Look(_INKS[colour], MARKERS[k]), panel.rows)
            for k, (name, column, colour) in enumerate(chart.curves)
        ]
    else:
        looks = _looks(list(dict.fromkeys(row[chart.series] for row in chart.rows)))
        curves = {value: [row for row in panel.rows if row[chart.series] == value] for value in looks}
        named = [
            (own[0][chart.legend] if chart.legend and own else value, y, looks[value], own) for value, own in curves.items()
        ]
    fitted = y == chart.y and bool(chart.fits)
    for name, column, look, rows in named:
        points, label = _points(chart, column, rows), re.sub(r"n\^(\S+)", r"$n^{\1}$", str(name))
        line = "" if chart.points or fitted else "-"
        axes.plot([p[0] for p in points], [p[1] for p in points], ls=line, label=label, **look._asdict())
        if any(low < high for _, _, low, high in points):
            shade = 0.12 if len(named) <= len(COLOURS) else 0.04
            axes.fill_between(*([p[i] for p in points] for i in (0, 2, 3)), color=look.color, alpha=shade, lw=0)
        if fitted:
            column = chart.fits[-1][0] if any(row.get(chart.fits[-1][0]) for row in rows) else chart.fits[0][0]
            there = [row for row in rows if row.get(column)]
            axes.plot([row[chart.x] for row in there], [row[column] for row in there], color=look.color, lw=0.9)
    axes.set(yscale="linear" if chart.linear else "log", xlabel=chart.x_label, ylabel=panel.fill(chart.y_label))
    drawn = any(line.get_xdata().size for line in axes.lines)
    if drawn and not chart.linear:
        plain_numbers(axes.yaxis)
    low, high = axes.get_ylim()
    if high < 2 * low:  # no power of ten and its like in between
        axes.yaxis.set_major_locator(MaxNLocator(5))
    if chart.x == "layer":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return
    axes.set_xscale("log")
    if chart.points and drawn:
        plain_numbers(axes.xaxis)
    elif drawn:
        xs = sorted({row[chart.x] for row in panel.rows})
        _ticks(axes, [x for x in xs if chart.x != "n" or math.log2(x).is_integer()] or xs)
    if y in chart.broken:
        _marks(axes, chart, looks)
    if y == chart.y and chart.guides:
        _guides(axes, chart)


def _marks(axes: Any, chart: Lines, looks: "Mapping[Any, _Look]") -> None:
    """Jumps as bands in the colour of their curve; the first few are named."""
    jumps = [b for b in chart.breaks if b.jump]
    for k, jump in enumerate(jumps[:_NOTES]):
        colour = looks[jump.curve].color
        axes.axvspan(jump.before, jump.after, color=colour, alpha=0.2, lw=0)
        note = f"{chart.series} {jump.curve}: {jump.text.split()[0]}"
        axes.annotate(
            note,
            (jump.after, 0.97 - 0.07 * k),
            (4, -6),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            fontsize=7,
            color=colour,
        )


def _guides(axes: Any, chart: Lines) -> None:
    """Dotted powers of `x` from the lowest point on."""
    xs, least = (
        sorted({row[chart.x] for row in chart.rows}),
        min((row[chart.y] for row in chart.rows if row[chart.y] > 0), default=1.0),
    )
    for power, style in zip(chart.guides, itertools.cycle((":", "-.")), strict=False):
        axes.plot(
            [xs[0], xs[-1]], [least, least * (xs[-1] / xs[0]) ** power], style, color="0.5", lw=0.9, label=f"$n^{{{power:g}}}$"
        )


def _name_curves(axes: Any, chart: Lines) -> None:
    """A legend beside the axes; a bar of colours where there are too many curves for one."""
    values = list(dict.fromkeys(row[chart.series] for row in chart.rows)) if chart.series else []
    if len(values) <= len(COLOURS):
        axes.legend(**_BESIDE)
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    axes.figure.colorbar(ScalarMappable(Normalize(0, len(values) - 1), "viridis"), ax=axes, label=chart.series, pad=0.02)


def _points(chart: Lines, y: str, rows: Sequence[Cells]) -> list[tuple[float, float, float, float]]:
    """Place, geometric mean, and the range of the records at one place; those without a positive value are left out."""
    places: dict[float, list[tuple[Cells, float]]] = {}
    for row in rows:
        value = row[y] if row[y] is None or chart.over is None else row[y] / row[chart.over]
        if value is not None and 0 < value < math.inf and row[chart.x] is not None:
            places.setdefault(0 if chart.points else row[chart.x], []).append((row, value))
    points = []
    for some in places.values():
        values, (row, _) = [value for _, value in some], some[0]
        low, high = (min(values), max(values)) if chart.over else (mean(values),) * 2
        if len(some) == 1 and chart.low and chart.high and y in (chart.y, *(column for _, column, _ in chart.curves)):
            low, high = row[chart.low], row[chart.high]
        points.append(
            (mean([float(row[chart.x]) for row, _ in some]) if chart.points else row[chart.x], mean(values), low, high)
        )
    return sorted(points)


def _heat(axes: Any, panel: _Panel) -> None:
    from matplotlib.colors import LogNorm

    chart: Heat = panel.chart
    values = {(row[chart.down], row[chart.x]): row[chart.y] for row in panel.rows}
    rows, columns = (sorted({key[i] for key in values}) for i in (0, 1))
    table = [[values.get((layer, column), math.nan) for column in columns] for layer in rows]
    positive = [v for v in values.values() if v > 0] or [1.0, 2.0]
    low, high = min(positive), max(positive)
    image = axes.imshow(table, cmap="cividis", norm=LogNorm(low, max(high, low * 1.001)), aspect="auto")
    _name(axes.xaxis, [str(column) for column in columns], 24)
    _name(axes.yaxis, [f"layer {layer}" for layer in rows])
    axes.tick_params(length=0)
    axes.set(xlabel=chart.x_label)
    for i, row in enumerate(table):
        for j, v in enumerate(row):
            if v > 0 and len(columns) <= 24 and len(rows) <= _NAMED:
                dark = math.log(v / low) < 0.5 * (math.log(high / low) or 1)
                axes.text(j, i, f"{v:.3g}", ha="center", va="center", fontsize=6, color="white" if dark else "black")
    plain_numbers(axes.figure.colorbar(image, ax=axes, label="L (log scale)", pad=0.02).ax.yaxis)


def _ladder(axes: Any, panel: _Panel) -> None:
    chart: Ladder = panel.chart
    rows = [row for row in panel.rows if row[chart.marks[0][0]] is not None]
    marks = [
        (i, (row[column] if column in chart.logs else math.log(max(row[column], 1e-12))) / math.log(10), row.get(look, look))
        for i, row in enumerate(rows)
        for column, look in chart.marks
        if row[column] is not None
    ]
    base = rows[0][chart.base] if chart.base else 0.0
    least = min((power for _, power, _ in marks), default=0.0)
    edge = (max(least, math.log10(base)) if base > 0 else least) + _DECADES
    for i, power, look in marks:
        kind, _, hollow = look.partition(" ")
        marker = ">" if power > edge else "s" if hollow else "o"
        axes.plot(10 ** min(power, edge), i, marker, color=_INKS[kind], fillstyle="none" if hollow else "full")
        if power > edge:
            axes.annotate(f"$10^{{{power:.0f}}}$", (10**edge, i), (-22, -3), textcoords="offset points", fontsize=7)
    if base > 0:
        axes.axvline(base, color="black", lw=1)
    axes.set(xscale="log", xlabel=chart.x_label, ylim=(len(rows) - 0.5, -0.5))
    _name(axes.yaxis, [fill(chart.label, row) for row in rows])
    axes.minorticks_off()


def _legend(axes: Any, swatches: tuple[tuple[str, str], ...], base: str | None) -> None:
    """What the marks of a ladder mean."""
    for look, said in swatches:
        kind, hollow = look.replace("hollow", "").strip() or "point", "hollow" in look
        fill_style = "none" if hollow else "full"
        axes.plot([], [], "s" if hollow else "o", color=_INKS[kind], fillstyle=fill_style, label=said)
    if base:
        axes.plot([], [], color="black", lw=1, label="measured")
    axes.legend(**_BESIDE)


def _bars(axes: Any, panel: _Panel) -> None:
    chart: Bars = panel.chart
    axes.bar([row[chart.x] for row in panel.rows], [row[chart.y] for row in panel.rows], color=COLOURS[1], width=0.8)
    axes.set(ylim=(0, 1), ylabel=chart.y, xlabel=chart.x)


def _picture(axes: Any, panel: _Panel) -> None:
    from matplotlib.colors import LogNorm

    chart: Picture = panel.chart
    norms = [[value if value > 0 else math.nan for value in line] for line in chart.norms]
    high = max((v for line in norms for v in line if v == v), default=1.0)
    low = min((v for line in norms for v in line if v == v), default=high)
    scale = LogNorm(max(low, high * _FAINT) * 0.999, high, clip=True)
    image = axes.imshow(norms, cmap="cividis", norm=scale, interpolation="nearest")
    axes.set(xlabel="input token", ylabel="output token")
    axes.figure.colorbar(image, ax=axes, label="norm of the derivative", pad=0.02)


def _name(axis: Any, names: list[str], most: int = _NAMED) -> None:
    """Names along an axis, all or every second, third … where there are many."""
    step = math.ceil(len(names) / most)
    axis.set_ticks(range(0, len(names), step), names[::step])


class _Look(NamedTuple):
    color: Any
    marker: str


def _looks(values: Sequence[Any]) -> dict[Any, _Look]:
    """A colour and a marker for every curve; where there are many, colours go from the first to the last."""
    import matplotlib

    if len(values) <= len(COLOURS):
        return {value: _Look(COLOURS[i], MARKERS[i]) for i, value in enumerate(values)}
    shades = matplotlib.colormaps.get_cmap("viridis").resampled(len(values))
    return {value: _Look(shades(i), "o") for i, value in enumerate(values)}


def _ticks(axes: Any, values: Sequence[float]) -> None:
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.xaxis.minorticks_off()


def _rows(panel: _Panel, column: str) -> int:
    return len({row[column] for row in panel.rows})


_DRAWS: dict[type[Chart], Callable[[Any, _Panel], None]] = {
    Lines: _lines,
    Heat: _heat,
    Ladder: _ladder,
    Bars: _bars,
    Picture: _picture,
}
# width and height of a panel, in inches
_SIZES: dict[type[Chart], Callable[[_Panel], tuple[float, float]]] = {
    Lines: lambda p: (5.4, 2.6) if p.chart.x == "layer" or p.chart.legend else (2.9, 2.9),
    Heat: lambda p: (1.6 + 0.36 * _rows(p, p.chart.x), 1.1 + 0.22 * _rows(p, p.chart.down)),
    Ladder: lambda p: (5.6, 1.0 + 0.22 * len(p.rows)),
    Bars: lambda p: (5.4, 1.4),
    Picture: lambda p: (5.0, 4.4),
}
