"""The answer in three sentences, and the findings below it, in words made from the numbers."""

import math
from typing import Literal

from howsmooth.report.data import ReportData
from howsmooth.study.fit import Break, Interval
from howsmooth.study.jobs import Row

# A sentence is a list of pieces; how each is set is for the page to decide.
Piece = tuple[str, Literal["", "strong", "sup"]]
Sentence = list[Piece]


def plain(sentence: Sentence) -> str:
    """A sentence as text."""
    return "".join(f"^{text}" if kind == "sup" else text for text, kind in sentence)


def answer(data: ReportData) -> list[Sentence]:
    """Which layer is least smooth, how it grows with n, how far it is from the ceiling."""
    worst = data.least_smooth()
    return [_least_smooth(data, worst), _growth(data, worst), _ceiling(data, worst)]


def _least_smooth(data: ReportData, worst: Row) -> Sentence:
    over = f", in the mean of {worst['samples']} samples" if worst["samples"] > 1 else ""
    best = min((row for row in data.summary if row["n"] == worst["n"]), key=lambda row: row["mean"])
    beside = f"; in the smoothest, layer {best['layer']}, {number(best['mean'])} times" if best is not worst else ""
    return [
        (f"Layer {worst['layer']} is the least smooth:", "strong"),
        (
            f" at n = {worst['n']} tokens a small change of what enters its attention can come out "
            f"{number(worst['mean'])} times as large{over}{beside}.",
            "",
        ),
    ]


def _growth(data: ReportData, worst: Row) -> Sentence:
    fit = data.fits.get(worst["layer"])
    if fit is None:
        reason = "Only one length was measured" if len(data.lengths) == 1 else "Fewer than two lengths gave a positive constant"
        return [(f"{reason}, so nothing can be said of growth.", "")]
    exponents = [f.exponent.value for f in data.fits.values()]
    pieces: Sentence = [
        (f"From {fit.lengths[0]} to {fit.lengths[-1]} tokens its constant ", ""),
        ("grows about like n", "strong"),
        (f"{fit.exponent.value:.2f}", "sup"),
    ]
    sure = interval(fit.exponent)
    others = (
        f"; over all layers the exponent goes from {min(exponents):.2f} to {max(exponents):.2f}" if len(exponents) > 1 else ""
    )
    pieces.append((f"{f' (95 % interval {sure})' if sure else ''}{others}", ""))
    if data.jumps:
        layer, jump = data.jumps[0]
        pieces.append((", but ", ""))
        pieces.append((f"layer {layer} jumps {times(jump.change.value)} between n = {jump.before} and {jump.after}", "strong"))
    pieces.append((".", ""))
    return pieces


def _ceiling(data: ReportData, worst: Row) -> Sentence:
    rows = [bound for bound in data.bounds if bound["side"] == "upper" and bound["log_value"] is not None]
    if not rows:
        return [("No bound was computed, so the distance from the ceiling is not known.", "")]
    layer = data.least_smooth({bound["layer"] for bound in rows})["layer"]
    rows = [bound for bound in rows if bound["layer"] == layer]
    which = "" if layer == worst["layer"] else f" for layer {layer}"
    n = min({bound["n"] for bound in rows}, key=lambda k: abs(k - worst["n"]))
    at, over = (
        min((b for b in rows if (b["n"], b["where"]) == (n, where)), key=lambda b: b["log_value"], default=None)
        for where in ("point", "ball")
    )
    pieces: Sentence = [("The ceiling is higher:", "strong"), (which, "")]
    if at is not None:
        text = f" at n = {n} theory certifies at most {huge(at['log_value'])} at the first sample"
        pieces.append((f"{text}, {_far(at)} what was measured there", ""))
    if over is not None:
        start = ", and" if at is not None else f" at n = {n} theory allows"
        pieces.append((f"{start} {huge(over['log_value'])}, {_far(over)}, over all inputs whose tokens are no longer", ""))
    pieces.append((".", ""))
    return pieces


def findings(data: ReportData) -> list[Sentence]:
    """One paragraph per jump, largest first, then the notes that came with the data."""
    return [_jump(data, layer, jump) for layer, jump in data.jumps] + [[(note, "")] for note in data.notes]


def _jump(data: ReportData, layer: int, jump: Break) -> Sentence:
    fit = data.fits[layer]
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
    before, after = (
        {row["head"]: row["value"] for row in data.of("head") if (row["layer"], row["n"]) == (layer, n)}
        for n in (jump.before, jump.after)
    )
    ratios = {h: after[h] / before[h] for h in before.keys() & after.keys() if before[h] > 0 and after[h] > 0}
    if len(ratios) < 2:
        return ""
    order = sorted(ratios, key=lambda h: -abs(math.log(ratios[h])))
    top, others = order[0], order[1:]
    rest = max(abs(math.log(ratios[h])) for h in others)
    change = f"head {top} goes from {number(before[top])} to {number(after[top])}"
    if rest < abs(math.log(ratios[top])) / 4:  # a quarter, on the log scale: one head stands out at a glance
        still = f"no other changes by more than {100 * math.expm1(rest):.0f} %" if rest >= 0.005 else "no other changes"
        return f"One head carries it: {change}, while {still}. "
    return f"Most of it in one head: {change}. "


def _new_positions(data: ReportData, layer: int, jump: Break) -> str:
    shares = data.shares.get(jump.after, {}).get(layer)
    if shares is None:
        return ""
    new = math.fsum(shares[jump.before :]) / (math.fsum(shares) or 1)
    return f"The positions past {jump.before} carry {100 * new:.0f} % of the worst direction. "


def number(value: float) -> str:
    """Three digits, thousands apart, or a power of ten."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{float(f'{value:.3g}'):,.0f}".replace(",", "\u202f") if abs(value) >= 100 else f"{value:.3g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}·10^{int(power)}"


def times(factor: float) -> str:
    return f"{number(factor)}-fold" if factor >= 1 else f"down {number(1 / factor)}-fold"


def interval(ends: Interval) -> str:
    return "" if ends.low is None or ends.high is None else f"{ends.low:.2f} to {ends.high:.2f}"


def huge(log: float) -> str:
    """`exp(log)`, as a power of ten where it is large."""
    return number(math.exp(log)) if log < 50 else f"10^{log / math.log(10):.0f}"


def _far(bound: Row) -> str:
    """How many times what was measured."""
    return f"{huge(bound['log_value'] - math.log(bound['value']))} times" if bound["value"] > 0 else "any number of times"
