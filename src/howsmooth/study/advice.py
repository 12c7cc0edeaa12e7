"""What to do about it: advice that follows from what was measured, with its evidence, and a table with one row a layer."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from howsmooth.study.answers import ReportData
from howsmooth.study.charts import Column, Drawing, Section, Table, number, percent, quoted, ranges
from howsmooth.study.fit import Break
from howsmooth.study.heads import HeadRow
from howsmooth.study.jobs import Cells
from howsmooth.study.layers import LayerRow
from howsmooth.study.profile import Profile, profiles
from howsmooth.study.question import Question
from howsmooth.study.token import is_sink
from howsmooth.study.yardsticks import HIGH, YardstickRow

_FORMATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_SMALL = 0.01  # of the output: rounding that moves it by less in the mean is left alone
_EVENLY = 3**-0.5  # root mean square of errors that are spread evenly up to one
_CALM = 2.0  # times averaging, below which attention adds little
_SHARP = 10.0  # times averaging, above which a layer is called sharp
_JUMPS = 3  # that are told
_LARGE = 700.0  # logarithm up to which a number is one


@final
@dataclass(frozen=True)
class Advice:
    """One piece of advice for one or more layers.

    kind: a short name.  words: one or two for every layer it speaks of.  found: the evidence.  do: what to do about it.
    section: of the page that shows the evidence.
    """

    kind: str
    words: Mapping[int, str]
    found: str
    do: str
    section: str


Rule = Callable[[ReportData, Sequence[Profile]], list[Advice]]


def advice(data: ReportData) -> list[Advice]:
    """All that the measurements give reason for, the most telling first."""
    layers = list(profiles(data).values())
    return [one for rule in _RULES for one in rule(data, layers)]


def word_of(layer: Profile, given: Sequence[Advice]) -> tuple[str, str | None]:
    """What stands in the table, and the kind of the advice it belongs to."""
    first = next((one for one in given if layer.layer in one.words), None)
    if first is not None:
        return first.words[layer.layer], first.kind
    if layer.times is None:
        return "–", None
    return ("near averaging" if layer.times < _CALM else "nothing stands out" if layer.times < _SHARP else "sharp"), None


def _jumps(data: ReportData, layers: Sequence[Profile]) -> list[Advice]:
    return [_jump(data, layer, jump) for layer, jump in data.jumps[:_JUMPS]]


def _jump(data: ReportData, layer: int, jump: Break) -> Advice:
    fit = data.fits[layer]
    at = dict(zip(fit.lengths, fit.means, strict=True))
    found = (
        f"**Layer {layer} jumps {change_in_words(jump)} between n = {jump.before} and {jump.after}**, "
        f"from L = {number(at[jump.before])} to {number(at[jump.after])}. {_carrier(data, layer, jump)}"
        f"{_new_positions(data, layer, jump)}One fit over all lengths gives n^{fit.exponent.value:.2f}; "
        f"fitted on each side of the jump, n^{fit.exponent_apart.value:.2f}."
    )
    do = (
        f"Check how the model was trained beyond {jump.before} tokens: extend its positions by training or interpolation, "
        f"or keep inputs at {jump.before} tokens."
    )
    return Advice("jump", {layer: f"jump at {jump.after}"}, found, do, "growth")


def change_in_words(jump: Break) -> str:
    """By how much L changes.

    >>> from howsmooth.study.fit import Interval
    >>> change_in_words(Break("jump", 8, 16, Interval(0.25, None, None), 0.0))
    'down 4-fold'
    """
    change = jump.change.value
    return f"{number(change)}-fold" if change >= 1 else f"down {number(1 / change)}-fold"


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
    return f"Most of it is in one head: {change}. "


def _new_positions(data: ReportData, layer: int, jump: Break) -> str:
    shares = data.shares.get(jump.after, {}).get(layer)
    if shares is None:
        return ""
    new = math.fsum(shares[jump.before :]) / (math.fsum(shares) or 1)
    return f"The tokens from position {jump.before} on carry {100 * new:.0f} % of the worst direction. "


def _one_token(data: ReportData, layers: Sequence[Profile]) -> list[Advice]:
    """One token carries layers: what is left with it frozen."""
    leading = [p for p in layers if p.one_token and p.first.top_token is not None]
    by_token: dict[int, list[Profile]] = {}
    for p in leading:
        by_token.setdefault(p.first.top_token or 0, []).append(p)
    return [_token(token, some) for token, some in sorted(by_token.items(), key=lambda one: -max(p.level.mean for p in one[1]))]


def _token(token: int, layers: Sequence[Profile]) -> Advice:
    word = quoted(layers[0].first.top_word or "")
    where = f"layer{'s' * (len(layers) > 1)} {ranges([p.layer for p in layers])}"
    shares = percent([p.first.top_share or 0.0 for p in layers])
    received = [p.first.top_received for p in layers if p.first.top_received is not None]
    sink = is_sink(received, layers[0].level.n)
    found = f"**Token {token}, {word}, {'is a sink' if sink else 'stands out'}:** "
    found += f"it carries {shares} of the worst direction in {where}"
    found += f" and draws {percent(received)} of all attention there." if len(received) == len(layers) else "."
    frozen = [p for p in layers if p.frozen is not None and p.frozen.token == token]
    most = max(frozen, key=lambda p: p.level.mean, default=None)
    if most is not None and most.frozen is not None:
        found += (
            f" With it frozen, L of layer {most.layer} falls from {number(most.frozen.whole)} to {number(most.frozen.value)}."
        )
    if sink:
        do = f"If nothing can change token {token} (a fixed first token, a cached prefix), L with it frozen is the number "
        do += "that counts. Otherwise look at this token first."
    else:
        do = "A change of this token moves the output most. Where it cannot change, L with it frozen is the number that counts."
    return Advice("token", {p.layer: f"{'freeze' if sink else 'look at'} token {token}" for p in layers}, found, do, "token")


def _one_head(data: ReportData, layers: Sequence[Profile]) -> list[Advice]:
    """One head carries layers."""
    heads = {p.layer: p.head for p in layers if p.head is not None and p.head.carries}
    if not heads:
        return []
    most = max(heads.values(), key=lambda head: head.value)
    (layer,) = [k for k, head in heads.items() if head is most]
    named = ", ".join(f"head {head.head} in layer {k}" for k, head in heads.items())
    whole = "" if most.whole is None else f" of the layer's {number(most.whole)}"
    found = (
        f"**One head carries {'a layer' if len(heads) == 1 else f'{len(heads)} layers'}:** {named}. Alone, head {most.head} of "
        f"layer {layer} has L = {number(most.value)}{whole} at n = {most.n}, and the next head {number(most.following)}."
    )
    do = "Look at what this head attends to. `howsmooth.clip_` caps the constant or the logits of single heads."
    return [Advice("head", {k: f"head {head.head}" for k, head in heads.items()}, found, do, "heads")]


def _logits(data: ReportData, layers: Sequence[Profile]) -> list[Advice]:
    """Heads whose logits are so large that softmax has decided."""
    high = {p.layer: y for p in layers if (y := p.yardstick) is not None and y.logits is not None and y.logits > HIGH}
    if not high:
        return []
    named = "; ".join(f"layer {k} up to {number(y.logits or 0)}{_heads(y)}" for k, y in high.items())
    found = f"**Logits above {HIGH:g}:** {named}."
    do = (
        "Softmax has decided at such logits, and rounding them in bfloat16 changes weights by more than a tenth. "
        "Keep logits in float32; in training follow `max_logit`, or cap it with `howsmooth.clip_(…, quantity='logit')`."
    )
    return [Advice("logits", dict.fromkeys(high, "high logits"), found, do, "heads")]


def _heads(row: YardstickRow) -> str:
    return f" (head{'s' * (len(row.high_heads) > 1)} {ranges(row.high_heads)})" if row.high_heads else ""


def _rounding(data: ReportData, layers: Sequence[Profile]) -> list[Advice]:
    """What formats of few bits do to the layer that is hurt most."""
    most = max((p for p in layers if p.relative), key=lambda p: p.relative or 0.0, default=None)
    if most is None or not most.relative:
        return []
    units = {name: torch.finfo(dtype).eps / 2 for name, dtype in _FORMATS.items()}
    gain = most.relative_gain
    moved = []
    for name, unit in units.items():
        on_average = "" if gain is None else f"about {part(unit * gain * _EVENLY)} in the mean, "
        moved.append(f"{name} ({part(unit)}) {on_average}{part(unit * most.relative)} at worst")
    found = f"**Rounding what enters layer {most.layer} moves its output:** {'; '.join(moved)}."
    usable = [name for name, unit in units.items() if unit * (most.relative if gain is None else gain * _EVENLY) <= _SMALL]
    coarse = [name for name in units if name not in usable]
    how = "at worst" if gain is None else "in the mean"
    if not coarse:
        do = f"All three formats keep the error {how} below 1 %."
    else:
        named = " and ".join(filter(None, [", ".join(coarse[:-1]), coarse[-1]]))
        do = f"{named} {'costs' if len(coarse) == 1 else 'cost'} more than 1 % of the output {how}: "
        do += f"keep what enters layer {most.layer} in {usable[-1] if usable else 'float32'}."
    return [Advice("rounding", {}, found, do, "layers")]


def part(share: float) -> str:
    """A share in percent, with two digits."""
    value = 100 * share
    return f"{value:.2g} %" if value < 99.5 else f"{number(value)} %"


_RULES: tuple[Rule, ...] = (_jumps, _one_token, _one_head, _logits, _rounding)


def figure(rows: list[LayerRow], data: ReportData) -> list[Drawing]:
    """A table with one row a layer."""
    given, lines = advice(data), []
    for p in profiles(data).values():
        word, kind = word_of(p, given)
        cells: Cells = {
            "layer": p.layer,
            "L": p.level.mean,
            "times": p.times,
            "relative": p.relative,
            "carrier": p.carrier or None,
        }
        cells |= {"exponent": round(p.fit.exponent.value, 2) if p.fit else None, "gain": p.gain}
        cells |= {"jump": f"{number(p.jump.change.value)}× at {p.jump.after}" if p.jump else None}
        bound = None if p.bound is None else math.exp(p.bound.log) if p.bound.log < _LARGE else math.inf
        cells |= {"bound": bound, "advice": word, "link": None if kind is None else f"#advice-{kind}"}
        lines.append(cells | {"focus": p.layer == data.focus})
    columns = (
        Column("layer", "layer"),
        Column("L", "L", "the local Lipschitz constant: how much the worst small change is amplified", heat=True),
        Column("× averaging", "times", "L over ‖W_o W_v‖, its value if the layer only averaged its tokens"),
        Column("relative", "relative", "L·|x| / |f(x)|: a change of 1 % of the input can become so many % of the output"),
        Column("gain", "gain", "‖J‖_F / √N: how much a random change is amplified"),
        Column(
            "carried by",
            "carrier",
            "the token with the largest share of the worst direction; a head where one carries the layer",
            text=True,
        ),
        Column("exponent", "exponent", "a in L ~ n^a"),
        Column("jump", "jump", "by how much, and at which length", text=True),
        Column("proved", "bound", "the least upper bound on L at this input that theory proves"),
        Column("advice", "advice", "why, and what to do", text=True, link="link"),
    )
    kept = tuple(c for c in columns if any(line[c.key] is not None for line in lines))
    return [
        Drawing((Table(name="layers", title="Layers", source="profiles", rows=lines, columns=kept, most=100, mark="focus"),))
    ]


def sentence(rows: list[LayerRow], data: ReportData) -> str:
    """Which numbers are means, and which are of one sample."""
    some = list(profiles(data).values())
    counts, lengths = ({getattr(p.level, key) for p in some} for key in ("samples", "n"))
    n, samples = (f"{min(both)}" if len(both) == 1 else f"{min(both)} to {max(both)}" for both in (lengths, counts))
    if counts == {1}:
        return f"All numbers are of one sample of {n} tokens."
    means = f"L, relative and × averaging are geometric means over {samples} samples"
    return f"At n = {n} tokens. {means}; gain, token, head and proved are of the first sample."


PROFILE = Question(
    name="profile",
    row=LayerRow,
    sentence=sentence,
    figure=figure,
    section=Section(
        id="layers",
        name="Layers",
        title="Layer by layer",
        place=1,
        text="$sentence",
    ),
)
