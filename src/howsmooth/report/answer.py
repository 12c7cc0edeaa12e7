"""The answer in three sentences, and the findings below it, in words made from the numbers."""

import math
from typing import Literal

from howsmooth.report.data import BoundRow, Cell, HeadMeasurement, ReportData
from howsmooth.study.fit import Break, GrowthFit, Interval

# A sentence is a list of pieces; how each is set is for the page to decide.
Piece = tuple[str, Literal["", "strong", "sup"]]
Sentence = list[Piece]


def plain(sentence: Sentence) -> str:
    """A sentence as text."""
    return "".join(f"^{text}" if kind == "sup" else text for text, kind in sentence)


def answer(data: ReportData) -> list[Sentence]:
    """Which layer is least smooth, how it grows with n, how far it is from the ceiling."""
    worst = max(data.cells, key=lambda c: c.mean)
    return [_least_smooth(data, worst), _growth(data, worst), _ceiling(data, worst)]


def _least_smooth(data: ReportData, worst: Cell) -> Sentence:
    over = f", in the mean of {worst.samples} samples" if worst.samples > 1 else ""
    best = min((c for c in data.cells if c.n == worst.n), key=lambda c: c.mean)
    beside = f"; in the smoothest, layer {best.layer}, {number(best.mean)} times" if best.layer != worst.layer else ""
    return [
        (f"Layer {worst.layer} is the least smooth:", "strong"),
        (
            f" at n = {worst.n} tokens a small change of what enters its attention can come out "
            f"{number(worst.mean)} times as large{over}{beside}.",
            "",
        ),
    ]


def _growth(data: ReportData, worst: Cell) -> Sentence:
    fit = data.fits.get(worst.layer)
    if fit is None:
        return [("Only one length was measured, so nothing can be said of growth.", "")]
    exponents = [f.exponent.value for f in data.fits.values()]
    span = f"from {fit.lengths[0]} to {fit.lengths[-1]} tokens"
    pieces: Sentence = [
        (f"{span[0].upper()}{span[1:]} its constant ", ""),
        ("grows about like n", "strong"),
        (f"{fit.exponent.value:.2f}", "sup"),
    ]
    sure = interval(fit.exponent)
    others = (
        f"; over all layers the exponent goes from {min(exponents):.2f} to {max(exponents):.2f}" if len(exponents) > 1 else ""
    )
    pieces.append((f"{f' (95 % interval {sure})' if sure else ''}{others}", ""))
    if found := jumps(data):
        layer, jump = max(found, key=lambda j: abs(math.log(j[1].change.value)))
        pieces.append((", but ", ""))
        pieces.append((f"layer {layer} jumps {times(jump.change.value)} between n = {jump.before} and {jump.after}", "strong"))
    pieces.append((".", ""))
    return pieces


def _ceiling(data: ReportData, worst: Cell) -> Sentence:
    rows = [b for b in data.bounds if b.side == "upper" and b.log_value is not None]
    if not rows:
        return [("No bound was computed, so the distance from the ceiling is not known.", "")]
    bounded = {b.layer for b in rows}
    layer = max((c for c in data.cells if c.layer in bounded), key=lambda c: c.mean).layer
    rows = [b for b in rows if b.layer == layer]
    which = "" if layer == worst.layer else f" for layer {layer}"
    n = min({b.n for b in rows}, key=lambda k: abs(k - worst.n))
    at, over = (_smallest([b for b in rows if b.n == n and b.where == where]) for where in ("point", "ball"))
    pieces: Sentence = [("The ceiling is higher:", "strong"), (which, "")]
    if at is not None:
        pieces.append(
            (f" at n = {n} theory certifies at most {power(at)} at the first sample, {far(at)} what was measured there", "")
        )
    if over is not None:
        start = ", and" if at is not None else f" at n = {n} theory allows"
        pieces.append((f"{start} {power(over)}, {far(over)}, over all inputs whose tokens are no longer", ""))
    pieces.append((".", ""))
    return pieces


def _smallest(rows: list[BoundRow]) -> BoundRow | None:
    return min(rows, key=lambda b: math.inf if b.log_value is None else b.log_value, default=None)


def findings(data: ReportData) -> list[Sentence]:
    """One paragraph per jump, largest first, then the notes that came with the data."""
    order = sorted(jumps(data), key=lambda j: -abs(math.log(j[1].change.value)))
    return [_jump(data, layer, data.fits[layer], jump) for layer, jump in order] + [[(note, "")] for note in data.notes]


def jumps(data: ReportData) -> list[tuple[int, Break]]:
    """Every jump of every layer."""
    return [(layer, b) for layer, fit in data.fits.items() for b in fit.breaks if b.kind == "jump"]


def _jump(data: ReportData, layer: int, fit: GrowthFit, jump: Break) -> Sentence:
    at = dict(zip(fit.lengths, fit.means, strict=True))
    sure = interval(jump.change)
    more = jump.after - jump.before
    text = (
        f" Layer {layer} goes from L = {number(at[jump.before])} at n = {jump.before} to {number(at[jump.after])} at "
        f"n = {jump.after}: {more} more token{'s' * (more > 1)} multiply it by {number(jump.change.value)} beyond its slope"
        f"{f' (95 % interval {sure})' if sure else ''}. "
    )
    text += _carrier(data, layer, jump)
    text += _new_positions(data, layer, jump)
    text += (
        f"One slope through everything would read n^{fit.exponent.value:.2f}; "
        f"with the jump apart it is n^{fit.exponent_apart.value:.2f}."
    )
    return [("A jump.", "strong"), (text, "")]


def _carrier(data: ReportData, layer: int, jump: Break) -> str:
    """Which head carries it, where the heads were measured on both sides."""
    before, after = (_heads(data.heads, layer, n) for n in (jump.before, jump.after))
    ratios = {h: after[h] / before[h] for h in before.keys() & after.keys() if before[h] > 0 and after[h] > 0}
    if len(ratios) < 2:
        return ""
    order = sorted(ratios, key=lambda h: -abs(math.log(ratios[h])))
    top, others = order[0], order[1:]
    rest = max(abs(math.log(ratios[h])) for h in others)
    change = f"head {top} goes from {number(before[top])} to {number(after[top])}"
    if rest < abs(math.log(ratios[top])) / 4:
        still = f"no other changes by more than {100 * math.expm1(rest):.0f} %" if rest >= 0.005 else "no other changes"
        return f"One head carries it: {change}, while {still}. "
    return f"Most of it in one head: {change}. "


def _heads(heads: tuple[HeadMeasurement, ...], layer: int, n: int) -> dict[int, float]:
    return {h.head: h.value for h in heads if h.layer == layer and h.n == n}


def _new_positions(data: ReportData, layer: int, jump: Break) -> str:
    for passage in data.passages:
        if passage.n == jump.after and layer in passage.shares:
            share = math.fsum(passage.shares[layer][jump.before :]) / (math.fsum(passage.shares[layer]) or 1)
            return f"The positions past {jump.before} carry {100 * share:.0f} % of the worst direction. "
    return ""


def number(value: float) -> str:
    """Three digits, thousands apart, or a power of ten."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{float(f'{value:.3g}'):,.0f}".replace(",", "\u202f") if abs(value) >= 100 else f"{value:.3g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}·10^{int(power)}"


def times(factor: float) -> str:
    return f"{number(factor)}-fold" if factor >= 1 else f"down {number(1 / factor)}-fold"


def interval(found: Interval, digits: int = 2) -> str:
    return "" if found.low is None or found.high is None else f"{found.low:.{digits}f} to {found.high:.{digits}f}"


def power(bound: BoundRow) -> str:
    """The bound itself, as a power of ten where it is large."""
    assert bound.log_value is not None
    return _huge(bound.log_value)


def far(bound: BoundRow) -> str:
    """How many times what was measured."""
    assert bound.log_value is not None
    if bound.measured <= 0:
        return "any number of times"
    away = bound.log_value - math.log(bound.measured)
    return f"{_huge(away)} times"


def _huge(log: float) -> str:
    return number(math.exp(log)) if log < 50 else f"10^{log / math.log(10):.0f}"
