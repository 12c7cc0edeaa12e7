"""Charts as data: one description of a figure, that the page's script and the figures for a paper both draw.

A chart shows records, one dictionary each, and names their columns. Titles and tips are templates: `{value}` is the number or
word in that column, `{share:%}` a percentage, `{log_value:log}` what it is the logarithm of, `{word:short}` a word cut short. A
line of a tip is left out where one of its columns is empty.
"""

import base64
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, final

import numpy as np

from howsmooth.study.jobs import Cells

ALL = "all"  # of a pick: every record, in geometric means
ANY = "both"  # in a column: a record that every option of its pick shows
_FAINT = 1e-4  # of the largest norm of a picture; smaller ones are shown as this
_CODES = 126  # shades of a picture
_BREAKS = re.compile(r"(?<=\*)(?=\*)|(?<=\^)")
_WORD = 24  # letters of a token that a sentence shows


@final
@dataclass(frozen=True)
class Option:
    """What can be picked. said: its words in a title."""

    value: Any
    text: str
    said: str = ""


@final
@dataclass(frozen=True)
class Pick:
    """A choice above the charts of a section: the records with this value in `column`; of `y`, which column is drawn.

    first: what is chosen at first.  panels: a figure has a panel for every option, and otherwise shows the first choice.
    """

    name: str
    label: str
    column: str
    options: tuple[Option, ...]
    first: Any
    panels: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Records and how they are shown.

    source: the name of the records in the page's data.  where: values that records must have.  tip: lines under the pointer.
    """

    draw: ClassVar[str]
    name: str
    title: str
    unit: str = ""
    source: str
    rows: Sequence[Cells]
    where: Mapping[str, Any] | None = None
    tip: tuple[str, ...] = ()

    def to_dict(self) -> Cells:
        """What the page's script reads; the records stand beside it, under `source`."""
        return {"draw": self.draw} | {f.name: plain_cells(getattr(self, f.name)) for f in fields(self) if f.name != "rows"}

    def shown(self, picked: Mapping[str, Any]) -> list[Cells]:
        """The records that a choice of columns' values shows."""
        wanted = {**picked, **(self.where or {})}
        return [r for r in self.rows if all(v == ALL or r.get(c, v) in (v, ANY) for c, v in wanted.items())]


@final
@dataclass(frozen=True)
class Band:
    """Where a curve breaks, between two places of `x`. curve: its value of `series`.  jump: or a bend.  text: by how much."""

    curve: Any
    before: float
    after: float
    jump: bool
    text: str


@final
@dataclass(frozen=True, kw_only=True)
class Lines(Chart):
    """Curves over a column, on logarithmic axes but for layers; or single points, one for each of `series`.

    curves: name, column and colour (point, ball, hot or ink) of each; or `series`, a column with a curve for each value, of
    which a pick of that column puts one in front of the others.  low, high: columns of a range.
    over: a column that values are divided by.  tip_all: lines under the pointer where a point is a mean of `count` records.
    linear: the axis of values is.  legend: a column with what a figure calls a curve.
    fits: columns drawn as lines over the curve in front, and how: `plain`, `apart`; band: two, with what lies between shaded.
    breaks: marked as bands.  guides: powers of `x`, dotted.
    Fits, band and guides belong to `y`; breaks to the columns `broken`.
    """

    draw = "lines"
    x: str = "layer"
    x_label: str = "layer"
    y: str = "value"
    y_label: str = "L, times"
    curves: tuple[tuple[str, str, str], ...] = ()
    series: str | None = None
    low: str | None = None
    high: str | None = None
    over: str | None = None
    points: bool = False
    tip_all: tuple[str, ...] = ()
    linear: bool = False
    legend: str = ""
    fits: tuple[tuple[str, str], ...] = ()
    band: tuple[str, str] | None = None
    breaks: tuple[Band, ...] = ()
    broken: tuple[str, ...] = ()
    guides: tuple[float, ...] = ()

    def shown(self, picked: Mapping[str, Any]) -> list[Cells]:
        """The records of a choice; all curves are there, whichever is in front."""
        return super().shown({column: value for column, value in picked.items() if column != self.series})


@final
@dataclass(frozen=True, kw_only=True)
class Heat(Chart):
    """Column `down` by column `x`, with `y` as a colour.

    mark: a column that says which cells are outlined.  each: a line of the tip for every record of a cell, whatever is picked.
    """

    draw = "heat"
    down: str = "layer"
    x: str
    x_label: str
    y: str = "value"
    mark: str | None = None
    each: str = ""


@final
@dataclass(frozen=True, kw_only=True)
class Ladder(Chart):
    """A row for each record with marks along a logarithmic axis.

    marks: columns, and how each looks: `point`, `ball`, `hot`, with `hollow` or not, or a column that says so.
    logs: marks that are logarithms.  base: a column drawn as a line.
    right: at the end of a row, or what stands there where it is empty.
    missing: a headline, and two templates for records without a mark.
    """

    draw = "ladder"
    label: str
    marks: tuple[tuple[str, str], ...]
    logs: tuple[str, ...] = ()
    right: tuple[str, str] = ("", "")
    x_label: str = "L, times"
    base: str | None = None
    missing: tuple[str, str, str] | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """A bar for each record, `y` of a whole, under the name in `x`."""

    draw = "bars"
    x: str
    y: str


@final
@dataclass(frozen=True, kw_only=True)
class Picture(Chart):
    """A square of numbers, one record: `n`, `low`, `high` and `codes`, made by `coded`. norms: the numbers themselves."""

    draw = "picture"
    norms: Sequence[Sequence[float]]
    across: str
    down: str

    def to_dict(self) -> Cells:
        """Without the numbers, which stand in the record as codes."""
        return {k: v for k, v in super().to_dict().items() if k != "norms"}


@final
@dataclass(frozen=True)
class Column:
    """A column of a table: its title, where its values stand, and what it means.

    text: of words.  link: the key of the place in the page that a value leads to.  heat: values have a colour.
    """

    title: str
    key: str
    help: str = ""
    text: bool = False
    link: str = ""
    heat: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class Table(Chart):
    """Records as a table that sorts. most: rows that are shown at first.  mark: a column that says which rows stand out."""

    draw = "table"
    columns: tuple[Column, ...]
    most: int = 25
    mark: str = ""


@final
@dataclass(frozen=True, kw_only=True)
class Passage(Chart):
    """The tokens of a text, by their number in the page's data, each shaded by its part in the list `y`."""

    draw = "passage"
    y: str


@final
@dataclass(frozen=True)
class Drawing:
    """Charts that share their picks: on the page one below the other, in a figure panels of one file.

    file: the name of that file, nothing where there is none.  across: its panels stand beside each other.
    on_page: whether the page has them.
    """

    charts: tuple[Chart, ...]
    picks: tuple[Pick, ...] = ()
    file: str | None = None
    across: bool = False
    on_page: bool = True


@final
@dataclass(frozen=True)
class Section:
    """Where a question stands on the page.

    id, title, name: of the section, its headline, and its name in the contents.  place: sections are in this order.
    text: HTML, with `$sentence` for what the question says and `$map` for the map.  swatches: a look and its meaning.
    below: HTML after the charts.  folded: one line of it is seen until it is opened.
    """

    id: str
    name: str
    title: str
    place: int
    text: str
    swatches: tuple[tuple[str, str], ...] = ()
    below: str = ""
    folded: bool = False


def plain_cells(value: Any) -> Any:
    """Dataclasses and what holds them as plain dictionaries and lists."""
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: plain_cells(getattr(value, f.name)) for f in fields(value)}
    return [plain_cells(v) for v in value] if isinstance(value, list | tuple) else value


def fill(template: str, cells: Mapping[str, Any]) -> str:
    """A template of a title with what stands in the columns."""

    def word(found: re.Match[str]) -> str:
        value = cells.get(found[1])
        return f"{value:g}" if isinstance(value, float) else str(value)

    return re.sub(r"\{(\w+)(?::[^}]*)?\}", word, template)


def coded(norms: Sequence[Sequence[float]]) -> Cells:
    """Numbers as 8-bit codes on a logarithmic scale from `low` (1) to `high` (127), 0 for zero; by rows.

    codes: each less the one above it, modulo 256, deflated, in base 64.
    faint: whether some are smaller than the least that is told apart.
    """
    table = np.nan_to_num(np.asarray(norms, float), nan=0.0, posinf=0.0)
    high = float(table.max(initial=0.0)) or 1.0
    least = float(table[table > 0].min(initial=high))
    low = max(least, _FAINT * high)
    scale = math.log(high / low) or 1.0
    codes = 1 + np.rint(_CODES * np.log(np.maximum(table, low) / low) / scale)
    codes = np.where(table > 0, codes, 0).astype(np.uint8)
    packed = zlib.compress(np.diff(codes, axis=0, prepend=np.uint8(0)).tobytes(), 9)
    return {"low": low, "high": high, "faint": least < low, "codes": base64.b64encode(packed).decode()}


def number(value: float) -> str:
    """Three digits, thousands apart, or a power of ten.

    >>> number(0.12345), number(2.5e7), number(math.inf)
    ('0.123', '2.5·10^7', '∞')
    """
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{float(f'{value:.3g}'):,.0f}".replace(",", "\u202f") if abs(value) >= 100 else f"{value:.3g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}·10^{int(power)}"


def percent(shares: Sequence[float]) -> str:
    """From the least to the greatest, in percent."""
    low, high = (f"{100 * end:.0f}" for end in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def ranges(layers: Sequence[int]) -> str:
    """Runs of neighbours.

    >>> ranges([1, 2, 3, 7, 9, 10])
    '1–3, 7, 9–10'
    """
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def quoted(word: str) -> str:
    """A token of the text in a sentence: short, on one line, its own stars and carets no marks."""
    word = " ".join(word.encode("utf-8", "replace").decode().split())
    word = word if len(word) <= _WORD else word[: _WORD - 1] + "…"
    return f"“{_BREAKS.sub(chr(0x2060), word)}”"
