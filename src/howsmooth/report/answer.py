"""The answer in three sentences or four, and the findings below it, in words made from the numbers.

A sentence is text with two marks, `**strong**` and `n^0.25`; how each is set is for the page to decide.
"""

import math
import re
from statistics import median

from howsmooth.study.answers import Level, ReportData
from howsmooth.study.ceilings import BesideBound, bounds_of
from howsmooth.study.charts import number, percent, quoted, ranges
from howsmooth.study.fit import Break, Interval
from howsmooth.study.heads import HeadRow
from howsmooth.study.token import Sink, sink_of

STRONG = re.compile(r"\*\*(.+?)\*\*")
_DRAWN = 0.25  # share of all attention above which a token is a sink,
_EVEN = 20  # or times an even share; under a causal mask the first of 1 024 tokens has 7.5 of them from uniform weights


def plain(sentence: str) -> str:
    """A sentence for a terminal: powers as they are, nothing strong."""
    return STRONG.sub(r"\1", sentence)


def answer(data: ReportData) -> list[str]:
    """Which layer is least smooth, which token is behind it if one is, how it grows with n, how far it is from the ceiling."""
    worst, sink = data.least_smooth(), sink_of(data)
    named = [] if sink is None else [_sink(data, sink)]
    return [_least_smooth(data, worst), *named, _growth(data, worst), _ceiling(data, worst)]


def _least_smooth(data: ReportData, worst: Level) -> str:
    over = f", in the mean of {worst.samples} samples" if worst.samples > 1 else ""
    best = min((row for row in data.summary if row.n == worst.n), key=lambda row: row.mean)
    beside = f"; in the smoothest, layer {best.layer}, {number(best.mean)} times" if best is not worst else ""
    return (
        f"**Layer {worst.layer} is the least smooth:** at n = {worst.n} tokens a small change of what enters its "
        f"attention can come out {number(worst.mean)} times as large{over}{beside}."
    )


def _sink(data: ReportData, sink: Sink) -> str:
    rows = sink.rows
    named = f"The first token, {quoted(sink.word)}," if sink.token == 0 else f"Token {sink.token + 1}, {quoted(sink.word)},"
    received = [row.received for row in rows if row.received is not None]
    known = len(received) == len(rows)
    is_sink = not known or median(received) > min(_DRAWN, _EVEN / rows[0].n)
    text = f"**{named} {'is a sink' if is_sink else 'stands out'}:** at n = {rows[0].n} it carries "
    text += f"{percent([row.share for row in rows])} of the worst direction in {len(rows)} of {len(data.layers)} layers "
    text += f"({ranges([row.layer for row in rows])})"
    if known:
        text += f" and draws {percent(received)} of all attention there"
    exponents = [data.fits[row.layer].exponent.value for row in rows if row.layer in data.fits]
    if exponents:
        ends = dict.fromkeys(f"n^{end:.2f}" for end in (min(exponents), max(exponents)))
        text += f"; they grow about like {' to '.join(ends)}"
        if min(exponents) >= 0.4 and max(exponents) <= 0.6:
            text += ", and one token that all others see alike gives n^0.50"
    most = max(rows, key=lambda row: row.whole)
    return f"{text}. With it held fixed, layer {most.layer} falls from {number(most.whole)} to {number(most.value)}."


def _growth(data: ReportData, worst: Level) -> str:
    fit = data.fits.get(worst.layer)
    if fit is None:
        reason = "Only one length was measured" if len(data.lengths) == 1 else "Fewer than two lengths gave a positive constant"
        return f"{reason}, so nothing can be said of growth."
    text = f"From {fit.lengths[0]} to {fit.lengths[-1]} tokens its constant **grows about like n**^{fit.exponent.value:.2f}"
    text += _interval(fit.exponent)
    exponents = [f.exponent.value for f in data.fits.values()]
    if len(exponents) > 1:
        text += f"; over all layers the exponent goes from {min(exponents):.2f} to {max(exponents):.2f}"
    if data.jumps:
        layer, jump = data.jumps[0]
        change = jump.change.value
        times = f"{number(change)}-fold" if change >= 1 else f"down {number(1 / change)}-fold"
        text += f", but **layer {layer} jumps {times} between n = {jump.before} and {jump.after}**"
    return f"{text}."


def _ceiling(data: ReportData, worst: Level) -> str:
    uppers = [beside for beside in bounds_of(data) if beside.bound.side == "upper" and beside.bound.log_value is not None]
    if not uppers:
        return "No bound was computed, so the distance from the ceiling is not known."
    layer = data.least_smooth({row.layer for row, _ in uppers}).layer
    uppers = [beside for beside in uppers if beside.row.layer == layer]
    n = min({row.n for row, _ in uppers}, key=lambda k: abs(k - worst.n))
    at, over = (
        min((b for b in uppers if (b.row.n, b.bound.where) == (n, where)), key=lambda b: b.log, default=None)
        for where in ("point", "ball")
    )
    text = "**The ceiling is higher:**" + ("" if layer == worst.layer else f" for layer {layer}")
    if at is not None:
        text += f" at n = {n} theory certifies at most {_huge(at.log)} at the first sample, "
        text += f"{_far(at)} what was measured there"
    if over is not None:
        text += ", and" if at is not None else f" at n = {n} theory allows"
        text += f" {_huge(over.log)}, {_far(over)}, over all inputs whose tokens are no longer"
    return f"{text}."


def findings(data: ReportData) -> list[str]:
    """One paragraph per jump, largest first, then the notes that came with the data."""
    return [_jump(data, layer, jump) for layer, jump in data.jumps] + list(data.notes)


def _jump(data: ReportData, layer: int, jump: Break) -> str:
    fit = data.fits[layer]
    at = dict(zip(fit.lengths, fit.means, strict=True))
    more = jump.after - jump.before
    return (
        f"**A jump.** Layer {layer} goes from L = {number(at[jump.before])} at n = {jump.before} to {number(at[jump.after])} "
        f"at n = {jump.after}: {more} more token{'s' * (more > 1)} multiply it by {number(jump.change.value)} beyond its slope"
        f"{_interval(jump.change)}. {_carrier(data, layer, jump)}{_new_positions(data, layer, jump)}"
        f"One slope through everything would read n^{fit.exponent.value:.2f}; "
        f"with the jump apart it is n^{fit.exponent_apart.value:.2f}."
    )


def _carrier(data: ReportData, layer: int, jump: Break) -> str:
    """Which head carries it, where the heads were measured on both sides."""
    before, after = (
        {row.head: row.value for row in data.of(HeadRow) if (row.layer, row.n) == (layer, n)} for n in (jump.before, jump.after)
    )
    ratios = {h: after[h] / before[h] for h in before.keys() & after.keys() if before[h] > 0 and after[h] > 0}
    if len(ratios) < 2:
        return ""
    sizes = {h: abs(math.log(ratio)) for h, ratio in ratios.items()}
    top = max(sizes, key=lambda h: sizes[h])
    rest = max(size for h, size in sizes.items() if h != top)
    change = f"head {top} goes from {number(before[top])} to {number(after[top])}"
    if rest < sizes[top] / 4:  # a quarter, on the log scale: one head stands out at a glance
        still = f"no other changes by more than {100 * math.expm1(rest):.0f} %" if rest >= 0.005 else "no other changes"
        return f"One head carries it: {change}, while {still}. "
    return f"Most of it in one head: {change}. "


def _new_positions(data: ReportData, layer: int, jump: Break) -> str:
    shares = data.shares.get(jump.after, {}).get(layer)
    if shares is None:
        return ""
    new = math.fsum(shares[jump.before :]) / (math.fsum(shares) or 1)
    return f"The positions past {jump.before} carry {100 * new:.0f} % of the worst direction. "


def _interval(ends: Interval) -> str:
    return "" if ends.low is None or ends.high is None else f" (95 % interval {ends.low:.2f} to {ends.high:.2f})"


def _huge(log: float) -> str:
    """`exp(log)`, as a power of ten where it is large."""
    return number(math.exp(log)) if log < 50 else f"10^{log / math.log(10):.0f}"


def _far(beside: BesideBound) -> str:
    """How many times what was measured."""
    value = beside.row.value
    return f"{_huge(beside.log - math.log(value))} times" if value > 0 else "any number of times"
