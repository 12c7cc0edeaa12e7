"""Which kind of attention is smoothest? A layer's own weights and text with every kind put in, one after the other."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, final

import torch
from torch import Tensor, nn

from howsmooth.errors import HowSmoothError
from howsmooth.kernels.kinds import Softmax
from howsmooth.maps import Attention
from howsmooth.models import Model
from howsmooth.models.measurement import estimate_columns
from howsmooth.progress import Progress
from howsmooth.study.answers import ReportData
from howsmooth.study.charts import ALL, Chart, Column, Drawing, Lines, Option, Pick, Section, Table, number
from howsmooth.study.choices import (
    KINDS,
    LONGEST,
    ChoiceRow,
    KindName,
    LeftOutRow,
    choice_jobs,
    closed_form,
    cost_of,
    kind_names,
    put_in,
    usual_lengths,
)
from howsmooth.study.fit import slope
from howsmooth.study.jobs import Cells, EstimateRow, Job, Measured, grouped, run_here, to_frame
from howsmooth.study.maps_beside import QUANTITY
from howsmooth.study.question import Extras, Question, Steps, later, mean, nothing
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Part, ScopeOptions, Setting, checked_factors, parts, setting_of, task_of_part, with_scope
from howsmooth.verbs import lipschitz_batch

if TYPE_CHECKING:
    import pandas

REACH = (0.25, 0.5, 1.0, 2.0, 4.0)  # what tokens are multiplied by
_PAGE, _FEW = (16, 32, 64, 128), 2  # lengths and samples on a page


@final
@dataclass(frozen=True, kw_only=True)
class VariantRow(EstimateRow):
    """A layer with another kind of attention at one window, its tokens multiplied by `factor`.

    output: `|f(x)|`, Frobenius.  relative: `L·|x|/|f(x)|`.  cost: the time of one pair of products over softmax's, where tokens
    have their own size. The rest is as in `ChoiceRow`.
    """

    kind = "variant"
    upper: float = field()
    steps: int = field()
    factor: float
    variant: str
    way: str
    scale: float | None = None
    entropy: float
    target: float | None = None
    matched: bool
    output: float | None = None
    relative: float | None
    cost: float | None


def variant_jobs(setting: Setting, choices: Sequence[ChoiceRow], factors: Sequence[float] = REACH) -> list[Job]:
    """Every kind and way that was chosen, in every layer, at every length and sample; tokens of other sizes at one length."""
    sizes, middle, jobs = checked_factors(factors), setting.nearest(LONGEST), []
    for part in parts(setting, layers=1):
        own = [row.to_dict() for row in choices if row.layer == part.layers[0]]
        more = [f for f in sizes if f != 1] if part.n == middle and part.first == 0 else []
        if own:
            jobs.append(part.job(measure_variants, choices=own, factors=more))
    return jobs


@task_of_part
def measure_variants(
    reader: Reader, part: Part, choices: list[Cells], factors: list[float]
) -> Iterator[VariantRow | LeftOutRow]:
    """A row for every choice and window, and for every factor at the first window, or why there is none."""
    captured, (layer,) = part.capture(reader), part.layers
    inputs = [(closed_form(c, layer), c.tokens(layer)) for c in captured]
    alike = all(attn is inputs[0][0] for attn, _ in inputs)
    batches = [inputs] if alike else [[i] for i in inputs]
    chosen = [ChoiceRow.of(cells) for cells in choices]
    for first, batch in zip(range(0, len(inputs), len(batches[0])), batches, strict=True):
        x = torch.stack([tokens for _, tokens in batch])
        here = replace(part, first=part.first + first, starts=part.starts[first:][: len(batch)])
        yield from _rows(here, captured.model, batch[0][0], x, 1.0, chosen)
        for factor in factors if first == 0 else []:
            yield from _rows(here, captured.model, batch[0][0], factor * x[:1], factor, chosen)


def _rows(
    part: Part, model: str, attn: Attention, x: Tensor, factor: float, choices: list[ChoiceRow]
) -> Iterator[VariantRow | LeftOutRow]:
    """Every choice at a batch of windows, (batch, n, d). Costs are timed here, in turns with softmax's."""
    (layer,) = part.layers
    softmax = put_in(attn, Softmax())
    for chosen in choices:
        about: Cells = {"model": model, "layer": layer, "map": "attention", "n": part.n, "factor": factor}
        about |= {"variant": chosen.variant, "way": chosen.way}
        began = time.perf_counter()
        try:
            f = put_in(attn, KINDS[chosen.variant](layer), chosen.scale)
            timed = factor == 1 and chosen.variant != "softmax"
            cost = cost_of(f, softmax, x[:1]) if timed else 1.0 if factor == 1 else None
            estimates = lipschitz_batch(f, x, tol=part.tol, certify=part.certify)
            outputs = f(x)
        except HowSmoothError as error:
            yield LeftOutRow(**about, reason=str(error))
            continue
        about |= {"scale": chosen.scale, "entropy": chosen.entropy, "target": chosen.target, "matched": chosen.matched}
        seconds = (time.perf_counter() - began) / len(x)
        for i, estimate in enumerate(estimates):
            lengths, output = x[i].double().norm(dim=-1), float(outputs[i].double().norm())
            size = float(lengths.norm())
            yield VariantRow(
                **about,
                **estimate_columns(estimate),
                sample=part.first + i,
                start=part.starts[i],
                radius=size / part.n**0.5,
                radius_max=float(lengths.max()),
                output=output,
                relative=estimate.value * size / output if output > 0 else None,
                cost=cost,
                seconds=seconds,
            )


@final
@dataclass(frozen=True)
class Variants:
    """Every kind in every layer, and what was left out."""

    rows: tuple[VariantRow, ...]
    left_out: tuple[LeftOutRow, ...] = ()
    failures: tuple[str, ...] = ()

    def to_frame(self) -> "pandas.DataFrame":
        """The rows as a pandas data frame."""
        return to_frame([row.to_dict() for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        rows, left_out = ([row.to_dict() for row in some] for some in (self.rows, self.left_out))
        return {"rows": rows, "left_out": left_out, "failures": list(self.failures)}

    def table(self) -> list[Cells]:
        """One line per kind and way, geometric means over layers and samples; all but entropy at the longest length."""
        lines = []
        softmax = {_place(row): row.value for row in self.rows if row.variant == "softmax"}
        for (name, way), rows in by_variant(self.rows).items():
            plain = [row for row in rows if row.factor == 1]
            lengths, sizes = sorted({row.n for row in plain}), sorted({row.factor for row in rows})
            at = {n: mean([row.value for row in plain if row.n == n]) for n in lengths}
            last = [row for row in plain if row.n == lengths[-1]]
            line: Cells = {"kind": name, "scale": way} | {f"n={n}": at[n] for n in lengths}
            line["×softmax"] = mean([row.value / softmax[_place(row)] for row in last if softmax.get(_place(row))])
            line["n^"] = slope(at)
            line["R^"] = slope({f: mean([r.value for r in rows if r.factor == f]) for f in sizes})
            line["relative"] = mean([row.relative for row in last if row.relative is not None])
            line["entropy"] = sum(row.entropy for row in last) / len(last)
            line["matched"] = "" if way == "published" else f"{sum(r.matched for r in last)} of {len(last)}"
            line["cost"] = mean([row.cost for row in last if row.cost is not None])
            lines.append(line | {"steps": mean([row.steps for row in last])})
        return lines

    def __str__(self) -> str:
        lines = [f"{line['kind']} ({line['scale']}): {line['×softmax']:.3g} times softmax's L" for line in self.table()]
        return "\n".join(lines)

    __repr__ = __str__


@with_scope("map")
def variants(
    model: Model | nn.Module | str | Path,
    text: str | Sequence[int] | None = None,
    *,
    kinds: Sequence[str] | None = None,
    factors: Sequence[float] = REACH,
    progress: Progress | bool | None = None,
    **scope: Unpack[ScopeOptions],
) -> Variants:
    """`L` of every layer with every kind of attention put in, against the number of tokens, their size, and the cost.

    Args:
        model: Loaded, or what `load` takes.
        text: The text itself or token ids; Alice in Wonderland by default.
        kinds: Names in `howsmooth.study.choices.KINDS`; softmax is always there.
        factors: What the tokens are multiplied by.
        lengths: By default 16 to 128, as model and text allow.
        samples: Windows of the text at each length.
        layers: All by default.
        tol: As in `howsmooth.lipschitz`.
        certify: As in `howsmooth.lipschitz`.
        seed: Places the samples.
        progress: A bar where a person watches; False for none.

    Returns:
        All rows, which print as a table of kinds beside softmax.

    >>> from transformers import BertConfig, BertModel
    >>> shape = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> tiny = BertModel(BertConfig(**shape, intermediate_size=16, max_position_embeddings=32))
    >>> found = variants(tiny, [i % 37 for i in range(60)], kinds=["cosine"], lengths=[8, 16], samples=1)
    >>> [(line["kind"], line["scale"]) for line in found.table()]
    [('softmax', 'both'), ('cosine', 'published'), ('cosine', 'matched')]
    """
    names = kind_names(kinds)
    reader, setting = setting_of(model, text, scope, usual_lengths)
    steps = tasks(setting, kinds=names, factors=factors)
    return variants_of(VARIANTS.ask(steps, lambda jobs: run_here(reader, jobs, progress)))


def variants_of(measured: Measured) -> Variants:
    """The variants in what a study measured."""
    order = sorted(measured.of(VariantRow), key=lambda row: (row.layer, row.n, row.factor, row.sample))
    return Variants(tuple(order), tuple(measured.of(LeftOutRow)), measured.failures)


def by_variant(rows: Sequence[VariantRow]) -> dict[tuple[str, str], list[VariantRow]]:
    """Rows by kind and way, in the order of `KINDS`, as published before matched."""
    order = {name: k for k, name in enumerate(KINDS)}
    there = sorted(rows, key=lambda row: (order.get(row.variant, len(order)), row.way == "matched"))
    return grouped(there, lambda row: (row.variant, row.way))


def _place(row: VariantRow) -> tuple[int, int, float, int]:
    return row.layer, row.n, row.factor, row.sample


def tasks(setting: Setting, *, kinds: Sequence[KindName] | None = None, factors: Sequence[float] = REACH) -> Steps:
    """The scale of every kind in every layer, then every layer with every kind.

    kinds: kinds of attention to put in beside softmax, which is always there.
    factors: what the tokens are multiplied by.
    """
    names = kind_names(kinds)
    chosen = yield choice_jobs(setting, names)
    yield variant_jobs(setting, chosen.of(ChoiceRow), factors)


def _remarks(measured: Measured) -> list[str]:
    return list(dict.fromkeys(f"left out {row.variant}: {row.reason}" for row in measured.of(LeftOutRow)))


def on_page(setting: Setting, extras: Extras) -> Steps:
    """On few samples of middle lengths, where a page is to have it: each length has a dozen kinds."""
    if not extras.variants or setting.scope.map != "attention":
        return nothing()
    lengths = [n for n in setting.scope.lengths if n in _PAGE] or [setting.nearest(max(_PAGE))]
    few = replace(setting, scope=replace(setting.scope, lengths=tuple(lengths)), starts=setting.starts[:_FEW])
    return later(tasks(few))


def summary(data: ReportData) -> list[Cells]:
    """One line per kind of attention, way to put it in, layer, length and size of tokens, over its samples."""
    there = itertools.chain.from_iterable(by_variant(data.of(VariantRow)).values())
    lines = []
    for rows in grouped(there, lambda row: (row.variant, row.way, row.layer, row.n, row.factor)).values():
        values, relative = [row.value for row in rows], [row.relative for row in rows if row.relative is not None]
        about = rows[0].columns("variant", "way", "layer", "n", "factor", "entropy", "matched", "cost")
        ends = {"low": min(values), "high": max(values), "upper": max(row.upper for row in rows)}
        rest = {"steps": math.fsum(row.steps for row in rows) / len(rows), "samples": len(rows)}
        lines.append(about | {"mean": mean(values)} | ends | {"relative": mean(relative) if relative else None} | rest)
    return lines


def sentence(rows: list[VariantRow], data: ReportData) -> str:
    """Which kind has the least constant at the entropy of softmax, and which the least relative one, at the longest length."""
    lines = summary(data)
    n = max((line["n"] for line in lines), default=0)
    there = [line for line in lines if (line["n"], line["factor"]) == (n, 1) and line["way"] in ("both", "matched")]
    said = []
    for key, words in (("mean", "the smallest L"), ("relative", "the smallest relative constant")):
        base = {line["layer"]: line[key] for line in there if line["variant"] == "softmax"}
        over: dict[str, list[float]] = {}
        for line in there:
            if line[key] is not None and base.get(line["layer"]):
                over.setdefault(line["variant"], []).append(line[key] / base[line["layer"]])
        ratios = {name: mean(some) for name, some in over.items()}
        if len(ratios) > 1:
            least, most = min(ratios, key=lambda name: ratios[name]), max(ratios, key=lambda name: ratios[name])
            said.append(
                f"{least} has {words}, {number(ratios[least])} times softmax's, and {most} the largest, "
                f"{number(ratios[most])} times"
            )
    return f"At n = {n} and equal entropy {'; '.join(said)}." if said else ""


def figure(rows: list[VariantRow], data: ReportData) -> list[Drawing]:
    """Kinds of attention against length, size of the tokens and cost, for one layer or in the mean over all."""
    lines = summary(data)
    if not lines:
        return []
    layers, last = sorted({line["layer"] for line in lines}), max(line["n"] for line in lines)
    ways = ["matched"] * any(line["way"] == "matched" for line in lines) + ["published"]
    whole = Option(ALL, "all, geometric mean", "mean of layers")
    words = {"matched": "matched to softmax's entropy", "published": "as published"}
    picks = (
        Pick("variants-layer", "Layer", "layer", (whole, *(Option(k, f"layer {k}", f"layer {k}") for k in layers)), ALL),
        Pick("variants-way", "Scale", "way", tuple(Option(way, words[way]) for way in words), ways[0]),
        Pick("variants-quantity", "Show", "y", (replace(QUANTITY[0], value="mean"), QUANTITY[1]), "mean"),
    )
    scaled = {line["variant"] for line in lines if line["way"] != "published"}  # the others have one way to be put in
    equal = [line for line in lines if line["way"] != "published" or line["variant"] not in scaled]
    shown = Drawing(_charts(lines, last), picks)
    drawn = Drawing(_charts(equal, last), (picks[0], picks[2]), file="variants", across=True, on_page=False)
    table = Table(
        name="variants",
        title="",
        source="variants-table",
        rows=[line for layer in (ALL, *layers) for line in _table_of(lines, layer, last)],
        columns=(
            Column("kind", "variant", text=True),
            Column("scale", "scale", "as published, or matched to softmax's entropy", text=True),
            Column(f"L, n = {last}", "L"),
            Column("relative", "relative", "L·|x| / |f(x)|"),
            Column("entropy", "entropy", "mean over heads and queries, in nats"),
            Column("cost", "cost", "time of one pair of products, softmax = 1"),
            Column("steps", "steps", "of the solver"),
            Column("layers", "layers"),
            Column("entropy reached", "matched", text=True),
        ),
        most=40,
    )
    return [replace(shown, charts=(*shown.charts, table)), drawn]


def _charts(lines: list[Cells], last: int) -> tuple[Chart, ...]:
    """Against the length, the size of the tokens where it changes, and the cost."""
    moved = next((line["n"] for line in lines if line["factor"] != 1), None)

    def lines_over(name: str, title: str, x: str, x_label: str, where: Cells, points: bool = False) -> Chart:
        return Lines(
            name=f"variants-{name}",
            title=f"{{y}} {title}, {{layer}}",
            unit="geometric means, log scales",
            source="variants",
            rows=lines,
            where=where,
            x=x,
            x_label=x_label,
            y="mean",
            y_label="{y}",
            series="variant",
            low="low",
            high="high",
            points=points,
            tip=("{variant}, {way}", "L = {mean}, upper end at most {upper}", "relative: {relative}", "entropy {entropy}"),
            tip_all=("{variant}", "{y} = {shown} over {count} layers"),
        )

    length = lines_over("length", "against n", "n", "n, tokens", {"factor": 1})
    size = f"against the size of the tokens, n = {moved}"
    sizes = (lines_over("radius", size, "factor", "tokens multiplied by", {"n": moved}),) if moved else ()
    price = "time of one pair of products, softmax = 1"
    cost = lines_over("cost", f"against cost, n = {last}", "cost", price, {"n": last, "factor": 1}, points=True)
    return (length, *sizes, cost)


def _table_of(lines: list[Cells], layer: int | str, last: int) -> list[Cells]:
    """A line for each kind and way at the longest length, for one layer or over all."""
    there = [line for line in lines if (line["n"], line["factor"]) == (last, 1) and layer in (ALL, line["layer"])]
    groups = grouped(there, lambda line: (line["variant"], line["way"]))

    def over(own: list[Cells], key: str) -> float:
        return mean([line[key] for line in own if line[key]])

    return [
        {
            "layer": layer,
            "variant": name,
            "scale": "the layer's" if way == "both" else way,
            "L": over(own, "mean"),
            "relative": over(own, "relative"),
            "entropy": math.fsum(line["entropy"] for line in own) / len(own),
            "cost": over(own, "cost"),
            "steps": round(math.fsum(line["steps"] for line in own) / len(own)),
            "layers": len(own),
            "matched": None if way == "published" else f"{sum(line['matched'] for line in own)} of {len(own)}",
        }
        for (name, way), own in groups.items()
    ]


VARIANTS = Question(
    name="variants",
    row=VariantRow,
    tasks=tasks,
    title="L with every kind put in, geometric means over layers and samples; at the longest length from ×softmax on",
    table=lambda measured: variants_of(measured).table(),
    words=("kind", "scale"),
    lengths=usual_lengths,
    remarks=_remarks,
    on_page=on_page,
    sentence=sentence,
    figure=figure,
    section=Section(
        id="variants",
        name="Kinds",
        title="Which kind is smoothest?",
        place=45,
        text="The same layers on the same text with another kind of attention in place of softmax. $sentence Kinds differ in "
        "how sharp their weights are and in the size of what they give: <b>matched</b> sets each scale so that weights have "
        "the entropy of softmax's, the relative constant L·|x| / |f(x)| sets L against the size of the output.",
    ),
)
