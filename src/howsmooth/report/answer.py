"""The verdict in a few sentences: which layer, how bad, why, and what to do; in words made from the numbers.

A sentence is text with two marks, `**strong**` and `n^0.25`; how each is set is for the page to decide.
"""

import re
from html import escape

from howsmooth.study.advice import Advice, advice, change_in_words, part, word_of
from howsmooth.study.answers import ReportData
from howsmooth.study.charts import number, quoted
from howsmooth.study.profile import Profile, profiles

STRONG = re.compile(r"\*\*(.+?)\*\*")
_ALIKE = 1.25  # times the least constant, up to which layers are alike
_ELSEWHERE = 1.25  # times the headline's constant, above which another length is told too
_MORE_THAN_ALL = 1.0  # of the output
_NEAR = 2.0  # times averaging, up to which a layer is close to it


def plain(sentence: str) -> str:
    """A sentence for a terminal: powers as they are, nothing strong."""
    return STRONG.sub(r"\1", sentence)


def as_html(sentence: str, code: bool = False) -> str:
    """A sentence as it is read: what is strong in bold, powers such as n^0.25 raised, code as code where it is ours."""
    raised = re.sub(r"\^((?:\d|[−.-](?=\d))+)", r"<sup>\1</sup>", STRONG.sub(r"<b>\1</b>", escape(sentence)))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", raised) if code else raised


def answer(data: ReportData) -> list[str]:
    """Which layer amplifies most, how bad that is, why, and what to do."""
    layers, given = profiles(data), advice(data)
    worst = layers[data.focus]
    return [
        _which(data, worst, layers),
        _how_bad(worst),
        f"**Why:** {_why(worst)} {growth(data)}",
        f"**What to do:** {_do(worst, given)}",
    ]


def _which(data: ReportData, worst: Profile, layers: dict[int, Profile]) -> str:
    level, means = worst.level, [p.level.mean for p in layers.values()]
    over = f"the mean of {level.samples} samples" if level.samples > 1 else "one sample"
    about = f"at n = {level.n} tokens, {over}"
    if len(means) > 1 and max(means) <= _ALIKE * min(means):
        return (
            f"**All layers are alike ({number(min(means))} to {number(max(means))}):** a small change of what enters their "
            f"{data.methods.map} can come out so many times as large ({about}). Layer {level.layer} amplifies most."
        )
    text = f"**Layer {level.layer} amplifies most: {number(level.mean)}×.** "
    text += f"A small change of what enters its {data.methods.map} can come out {number(level.mean)} times as large ({about}"
    if len(means) > 1:
        least = min(layers.values(), key=lambda p: p.level.mean)
        text += f"; in layer {least.layer}, the least, {number(least.level.mean)} times"
    text += ")."
    top = max(data.summary, key=lambda other: other.mean)
    if top.mean > _ELSEWHERE * level.mean:
        text += f" At n = {top.n} layer {top.layer} reaches {number(top.mean)}."
    return text


def _how_bad(worst: Profile) -> str:
    said = []
    if worst.times is not None and worst.averaging is not None:
        only = f"what it would be if the layer only averaged its tokens ({number(worst.averaging)})"
        close = f"**That is close to averaging:** {number(worst.times)} times {only}."
        said.append(close if worst.times < _NEAR else f"**That is {number(worst.times)} times** {only}.")
    if worst.relative:
        share = worst.relative / 100
        change = f"A change of 1 % of the input, in the worst direction, can become **{part(share)} of the output**"
        change += ", more than all of it" if share > _MORE_THAN_ALL else ""
        noise = worst.relative_gain
        said.append(
            change
            + (
                f"; a random change of 1 % becomes about {part(noise / 100)}, since the worst direction is no noise."
                if noise
                else "."
            )
        )
    return " ".join(said) or "**How bad that is** was not measured: no yardstick is known for this layer."


def _why(worst: Profile) -> str:
    row, said = worst.first, []
    if worst.one_token and row.top_share is not None:
        token = f"token {row.top_token}, {quoted(row.top_word or '')},"
        text = f"{token[:1].upper()}{token[1:]} carries {100 * row.top_share:.0f} % of the worst direction"
        text += f" and draws {100 * row.top_received:.0f} % of all attention" if row.top_received is not None else ""
        if worst.frozen is not None and worst.frozen.token == row.top_token:
            text += f"; with it frozen L falls from {number(worst.frozen.whole)} to {number(worst.frozen.value)} (first sample)"
        said.append(f"{text}.")
    if worst.head is not None and worst.head.carries:
        head = worst.head
        said.append(
            f"Head {head.head} alone has L = {number(head.value)} at n = {head.n}, the next head {number(head.following)}."
        )
    if not said:
        spread = "" if row.top_share is None else f" (the largest share of a token is {100 * row.top_share:.0f} %)"
        said.append(f"No single token carries the worst direction{spread}, and no head stands out.")
    return " ".join(said)


def growth(data: ReportData) -> str:
    """How the constant of the layer in focus grows with the length."""
    fit = data.fits.get(data.focus)
    if fit is None:
        reason = "Only one length was measured" if len(data.lengths) == 1 else "Fewer than two lengths gave a positive constant"
        return f"{reason}, so nothing can be said of growth."
    ends = (
        ""
        if fit.exponent.low is None or fit.exponent.high is None
        else f" (95 % interval {fit.exponent.low:.2f} to {fit.exponent.high:.2f})"
    )
    text = f"From {fit.lengths[0]} to {fit.lengths[-1]} tokens L grows like n^{fit.exponent.value:.2f}{ends}"
    if data.jumps:
        layer, jump = data.jumps[0]
        text += f"; **layer {layer} jumps {change_in_words(jump)} between n = {jump.before} and {jump.after}**"
    return f"{text}."


def _do(worst: Profile, given: list[Advice]) -> str:
    own = next((one for one in given if worst.layer in one.words), None)
    rounding = next((one.do for one in given if one.kind == "rounding"), None)
    if own is None:
        sharp = word_of(worst, given)[0] == "sharp"
        shared = "Many tokens and heads share the work, so look at the text and the heads below. "
        lower = "In training a `SmoothnessPenalty` lowers L."
        text = shared + lower if sharp else "Nothing stands out, so nothing has to be done."
    else:
        text = own.do
    return " ".join(filter(None, [text, rounding]))


def findings(data: ReportData) -> list[str]:
    """Every piece of advice with its evidence, then the notes that came with the data."""
    return [f"{one.found} {one.do}" for one in advice(data)] + data.remarks
