"""Which kind of attention is smoothest? A layer's own weights and text with every kind put in, one after the other.

A kind comes as its source has it (`published`), and with the scale at which its weights have the mean entropy of softmax's on
the same tokens (`matched`), so that attention as sharp as the model's own is compared. One scale per layer and kind, found on
the first sample; docs/howto/variants.md says what it means for kinds whose weights are no shares.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from howsmooth.errors import HowSmoothError
from howsmooth.kernels import Mask, Scores, plain_attention
from howsmooth.kernels.kinds import L2, Cosine, Differential, Hard, Kind, Linear, Sigmoid, Sinkhorn, Softmax
from howsmooth.maps import Attention
from howsmooth.models import Capture, Model
from howsmooth.models.measurement import estimate_columns
from howsmooth.run import Progress
from howsmooth.settings import choice, items, number
from howsmooth.study.jobs import Job, Measured, Row, run_here, to_frame
from howsmooth.study.layers import Part, Setting, parts
from howsmooth.study.lengths import asked, fitting_lengths
from howsmooth.study.reader import Reader
from howsmooth.verbs import lipschitz_batch

if TYPE_CHECKING:
    import pandas

REACH = (0.25, 0.5, 1.0, 2.0, 4.0)  # what tokens are multiplied by
LONGEST = 256  # tokens up to which weights are written down to find a scale
_NAMES = "a list of kinds of attention"
_DOUBLINGS = 12  # of the published scale, either way, between which a scale is looked for
_HALVINGS = 14  # of a factor of two: a scale to four digits
_CLOSE = 0.01  # nats within which two mean entropies are the same
_REPEATS = 7  # of a timed pair, the quickest counts


def _lam(layer: int) -> float:
    """`λ` of differential attention as its paper starts to train it."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


# By name, the kind that is put into a layer, counted from 0.
KINDS: dict[str, Callable[[int], Kind]] = {
    "softmax": lambda _: Softmax(),
    "sigmoid": lambda _: Sigmoid(),
    "l2": lambda _: L2(),
    "cosine": lambda _: Cosine(),
    "linear": lambda _: Linear(),
    "sinkhorn": lambda _: Sinkhorn(),
    "differential": lambda layer: Differential(_lam(layer), epsilon=1e-5, factor=1 - _lam(layer)),
    "hard": lambda _: Hard(),
    "l2-tied": lambda _: L2(tied=True),
    "cosine-values": lambda _: Cosine(values=False),
    "linear-relu": lambda _: Linear("relu"),
    "linear-sum": lambda _: Linear(normalized=False),
    "differential-plain": lambda layer: Differential(_lam(layer)),
    "balanced": lambda _: Sinkhorn(iterations=None),
}
USUAL = tuple(KINDS)[:8]


def kind_names(names: Sequence[str] | None) -> tuple[str, ...]:
    """Kinds to compare, checked, softmax first: all others are set against it."""
    if names is None:
        return USUAL
    given = items(names, _NAMES, f"choose from {', '.join(KINDS)}")
    checked = [choice(name, "kinds of attention", tuple(KINDS)) for name in given]
    return tuple(dict.fromkeys(["softmax", *checked]))


def usual_lengths(reader: Reader, samples: int) -> tuple[int, ...]:
    """Powers of two from 16 to 128 that model and text allow, or the shortest usual length."""
    fitting = fitting_lengths(reader, samples)
    return tuple(n for n in fitting if n in (16, 32, 64, 128)) or fitting[:1]


def put_in(attn: Attention, kind: Kind, scale: float | None = None) -> Attention:
    """A layer with another kind of attention at this scale, the kind's own by default; softmax keeps the layer's."""
    if scale is None and kind.traits.softmax and attn.kind.traits.softmax:
        scale = attn.scale
    keys: dict[str, Any] = {"w_k": None, "b_k": None} if kind.traits.tied else {}
    return replace(attn, kind=kind, scale=scale, **keys)


@torch.no_grad()
def mean_entropy(attn: Attention, x: Tensor) -> float:
    """Mean over heads and queries of `−Σ_j p_j log p_j`, `p` a row of the weights at tokens `x` (n, d) divided by its sum.

    Weights of differential attention have two signs: it is the mean over both of its softmaxes.
    """
    q, k, _ = attn.to(x.device, torch.float64).vectors(x.double()[None])
    n, kind, mask = len(x), attn.kind, Mask(attn.causal, attn.window, attn.attention_mask, attn.bias)
    scores = Scores(attn.scale, attn.softcap, mask, kind)
    v = torch.eye(n, dtype=q.dtype, device=q.device).expand(1, attn.kv_heads, n, n)  # P v = P
    if kind.traits.two_softmaxes is not None and (entry := kind.enter(q, k, v, scores.scale)) is not None:
        weights = plain_attention(*entry.vectors[:3], kind.inner(scores))
    else:
        weights = plain_attention(q, k, v, scores)
    p = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
    return float(torch.special.entr(p).sum(-1).mean())


def matched_scale(attn: Attention, x: Tensor, target: float) -> tuple[float, float]:
    """The scale of a layer at which its weights have this mean entropy, and the entropy there.

    Weights get sharper as it grows, those of sigmoid up to where they saturate. Where no scale gets there, the one that comes
    nearest among powers of two.
    """

    def at(power: float) -> float:
        return mean_entropy(replace(attn, scale=attn.scale * 2.0**power), x)

    found = {0.0: at(0.0)}
    way = 1 if found[0.0] > target else -1  # towards sharper weights, or away from them
    for power in range(way, way * (_DOUBLINGS + 1), way):
        found[power] = at(power)
        if (found[power] > target) != (way > 0):
            break
    below, above = ([power for power in found if (found[power] > target) == sharp] for sharp in (True, False))
    if not above:
        best = min(found, key=lambda power: found[power])
        return attn.scale * 2.0**best, found[best]
    if not below:
        best = max(found, key=lambda power: found[power])
        return attn.scale * 2.0**best, found[best]
    low, high = (float(max(below)), float(min(above)))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) > target else (low, middle)
    return attn.scale * 2.0**high, at(high)


def choice_jobs(setting: Setting, names: Sequence[str]) -> list[Job]:
    """The scale of every kind in every layer, on the first sample at the longest length up to 256."""
    if setting.question.map != "attention":
        return []
    there = [middle_length(setting)]
    return [
        Job(choose_scales, {"part": asdict(part), "kinds": list(names)}) for part in parts(setting, there, samples=1, layers=1)
    ]


def middle_length(setting: Setting) -> int:
    """The longest length asked for up to 256, where weights can be written down, or the shortest."""
    lengths = setting.question.lengths
    return max([n for n in lengths if n <= LONGEST], default=min(lengths))


def choose_scales(reader: Reader, part: dict[str, Any], kinds: list[str]) -> list[Row]:
    """A row for every kind and way, `choice`, with its scale and entropy; `left out` for what the layer has no form for."""
    one = Part.of(part)
    captured, (layer,) = one.capture(reader), one.layers
    attn, x = closed_form(captured[0], layer), captured[0].tokens(layer)
    about = {"model": captured.model, "layer": layer, "n": one.n}
    target, rows = mean_entropy(put_in(attn, Softmax()), x), []
    for name in kinds:
        try:
            for way, scale, entropy in _ways(put_in(attn, KINDS[name](layer)), x, target, name):
                row = {"kind": "choice", **about, "variant": name, "way": way, "scale": scale, "entropy": entropy}
                rows.append(row | {"target": target, "matched": way != "published" and abs(entropy - target) <= _CLOSE})
        except HowSmoothError as error:
            rows.append({"kind": "left out", **about, "variant": name, "reason": str(error)})
    return rows


def _ways(attn: Attention, x: Tensor, target: float, name: str) -> Iterator[tuple[str, float, float]]:
    """How a kind is put in: way, scale, entropy."""
    if name == "softmax":
        yield "both", attn.scale, target
        return
    yield "published", attn.scale, mean_entropy(attn, x)
    if attn.kind.traits.scaled:
        yield "matched", *matched_scale(attn, x, target)


def closed_form(captured: Capture, layer: int) -> Attention:
    """A layer in closed form, at one input; refused where it is no formula of its weights."""
    attn = captured.closed(layer)
    return captured.attention(layer) if attn is None else attn  # which says why there is none


def variant_jobs(setting: Setting, choices: Sequence[Row], factors: Sequence[float] = REACH) -> list[Job]:
    """Every kind and way that was chosen, in every layer, at every length and sample; tokens of other sizes at one length."""
    fix = "1 leaves the tokens as they are"
    expected = "positive factors below 1e6"
    sizes = [number(f, expected, fix, above=0.0, below=1e6) for f in items(factors, expected, fix)]
    middle, keys = middle_length(setting), ("variant", "way", "scale", "entropy", "target", "matched")
    by_layer = {layer: [{k: row[k] for k in keys} for row in choices if row["layer"] == layer] for layer in setting.layers}
    jobs = []
    for part in parts(setting, layers=1):
        more = [f for f in sizes if f != 1] if part.n == middle and part.first == 0 else []
        if by_layer[part.layers[0]]:
            jobs.append(Job(measure_variants, {"part": asdict(part), "choices": by_layer[part.layers[0]], "factors": more}))
    return jobs


def measure_variants(reader: Reader, part: dict[str, Any], choices: list[Row], factors: list[float]) -> list[Row]:
    """A row of kind `variant` for every choice and window, and for every factor at the first window; `left out` where refused.

    output: `|f(x)|`, Frobenius.  relative: `L·|x|/|f(x)|`.  cost: the time of one pair of products over softmax's, both timed
    here in turns, where tokens have their own size.
    """
    one = Part.of(part)
    captured, (layer,) = one.capture(reader), one.layers
    inputs = [(closed_form(c, layer), c.tokens(layer)) for c in captured]
    alike = all(attn is inputs[0][0] for attn, _ in inputs)
    batches = [inputs] if alike else [[i] for i in inputs]
    rows: list[Row] = []
    for first, batch in zip(range(0, len(inputs), len(batches[0])), batches, strict=True):
        x = torch.stack([tokens for _, tokens in batch])
        here = replace(one, first=one.first + first, starts=one.starts[first:][: len(batch)])
        rows += _rows(here, captured.model, batch[0][0], x, 1.0, choices)
        for factor in factors if first == 0 else []:
            rows += _rows(here, captured.model, batch[0][0], factor * x[:1], factor, choices)
    return rows


def _rows(one: Part, model: str, attn: Attention, x: Tensor, factor: float, choices: list[Row]) -> Iterator[Row]:
    """Every choice at a batch of windows, (batch, n, d)."""
    (layer,) = one.layers
    about = {"model": model, "layer": layer, "map": "attention", "n": one.n, "factor": factor}
    softmax = put_in(attn, Softmax())
    for chosen in choices:
        began = time.perf_counter()
        try:
            f = put_in(attn, KINDS[chosen["variant"]](layer), chosen["scale"])
            timed = factor == 1 and chosen["variant"] != "softmax"
            cost = cost_of(f, softmax, x[:1]) if timed else 1.0 if factor == 1 else None
            estimates = lipschitz_batch(f, x, tol=one.tol, certify=one.certify)
            outputs = f(x)
        except HowSmoothError as error:
            yield {"kind": "left out", **about, "variant": chosen["variant"], "way": chosen["way"], "reason": str(error)}
            continue
        seconds = (time.perf_counter() - began) / len(x)
        for i, estimate in enumerate(estimates):
            lengths, output = x[i].double().norm(dim=-1), float(outputs[i].double().norm())
            size = float(lengths.norm())
            yield {"kind": "variant", **about, **chosen, **estimate_columns(estimate)} | {
                "sample": one.first + i,
                "start": one.starts[i],
                "radius": size / one.n**0.5,
                "radius_max": float(lengths.max()),
                "output": output,
                "relative": estimate.value * size / output if output > 0 else None,
                "cost": cost,
                "seconds": seconds,
            }


@torch.no_grad()
def cost_of(f: Attention, softmax: Attention, x: Tensor) -> float:
    """The time of a jvp and a vjp of a layer over that of softmax, timed in turns."""
    operators = [layer.linearize(x)[1] for layer in (f, softmax)]
    v = torch.ones(1, *x.shape, dtype=x.dtype, device=x.device)
    best = [math.inf, math.inf]
    for _ in range(_REPEATS):
        for k, operator in enumerate(operators):
            began = time.perf_counter()
            float(operator.vjp(operator.jvp(v)).sum())  # waits for a device
            best[k] = min(best[k], time.perf_counter() - began)
    return best[0] / best[1]


@final
@dataclass(frozen=True)
class Variants:
    """Every kind in every layer. rows: of kind `variant`.  left_out: of kind `left out`, with their reasons."""

    rows: tuple[Row, ...]
    left_out: tuple[Row, ...] = ()
    failures: tuple[str, ...] = ()

    def to_frame(self) -> "pandas.DataFrame":
        return to_frame(self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {"rows": list(self.rows), "left_out": list(self.left_out), "failures": list(self.failures)}

    def table(self) -> list[Row]:
        """One line per kind and way, geometric means over layers and samples; all but entropy at the longest length."""
        lines = []
        for (name, way), rows in by_variant(self.rows).items():
            plain = [row for row in rows if row["factor"] == 1]
            lengths = sorted({row["n"] for row in plain})
            at = {n: mean(row["value"] for row in plain if row["n"] == n) for n in lengths}
            last = [row for row in plain if row["n"] == lengths[-1]]
            line: Row = {"kind": name, "scale": way} | {f"n={n}": at[n] for n in lengths}
            line["×softmax"] = mean(self.ratios(last, "value"))
            line["n^"] = slope(at)
            line["R^"] = slope({f: mean(r["value"] for r in rows if r["factor"] == f) for f in _sizes(rows)})
            line["relative"] = mean(row["relative"] for row in last if row["relative"] is not None)
            line["entropy"] = sum(row["entropy"] for row in last) / len(last)
            line["matched"] = "" if way == "published" else f"{sum(r['matched'] for r in last)} of {len(last)}"
            lines.append(line | {"cost": mean(row["cost"] for row in last), "steps": mean(row["steps"] for row in last)})
        return lines

    def ratios(self, rows: Sequence[Row], key: str) -> list[float]:
        """What rows have over what softmax has at the same layer and input."""
        base = {_place(row): row[key] for row in self.rows if row["variant"] == "softmax"}
        return [row[key] / base[_place(row)] for row in rows if row[key] is not None and base.get(_place(row))]

    def __str__(self) -> str:
        lines = [f"{line['kind']} ({line['scale']}): {line['×softmax']:.3g} times softmax's L" for line in self.table()]
        return "\n".join(lines)

    __repr__ = __str__


def variants(
    model: Model | nn.Module | str | Path,
    text: str | Sequence[int] | None = None,
    *,
    kinds: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    factors: Sequence[float] = REACH,
    samples: int = 8,
    layers: Sequence[int] | None = None,
    tol: float = 1e-3,
    certify: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Variants:
    """`L` of every layer with every kind of attention put in, against the number of tokens, their size, and the cost.

    kinds: names in `howsmooth.study.swapped.KINDS`; softmax is always there.  factors: what the tokens are multiplied by.
    lengths: by default 16 to 128, as model and text allow. The rest as in `growth`.

    >>> from transformers import BertConfig, BertModel
    >>> shape = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> tiny = BertModel(BertConfig(**shape, intermediate_size=16, max_position_embeddings=32))
    >>> found = variants(tiny, [i % 37 for i in range(60)], kinds=["cosine"], lengths=[8, 16], samples=1)
    >>> [(line["kind"], line["scale"]) for line in found.table()]
    [('softmax', 'both'), ('cosine', 'published'), ('cosine', 'matched')]
    """
    names, how = kind_names(kinds), {"tol": tol, "certify": certify, "seed": seed}
    reader, setting = asked(model, text, lengths, samples, layers, usual_lengths, **how)
    chosen = run_here(reader, choice_jobs(setting, names))
    return of(chosen, run_here(reader, variant_jobs(setting, chosen.of("choice"), factors), progress))


def of(*measured: Measured) -> Variants:
    """The variants in what a study measured."""
    rows = [row for part in measured for row in part.rows]
    order = sorted(
        (row for row in rows if row["kind"] == "variant"),
        key=lambda row: (row["layer"], row["n"], row["factor"], row["sample"]),
    )
    left = tuple(row for row in rows if row["kind"] == "left out")
    return Variants(tuple(order), left, tuple(reason for part in measured for reason in part.failures))


def by_variant(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by kind and way, in the order of `KINDS`, as published before matched."""
    groups: dict[tuple[str, str], list[Row]] = {}
    order = {name: k for k, name in enumerate(KINDS)}
    for row in sorted(rows, key=lambda row: (order.get(row["variant"], len(order)), row["way"] == "matched")):
        groups.setdefault((row["variant"], row["way"]), []).append(row)
    return groups


def slope(values: dict[Any, float]) -> float | None:
    """The exponent of the power law nearest to positive values, by their place; none of a single one."""
    points = [(math.log(x), math.log(y)) for x, y in values.items() if y > 0]
    if len(points) < 2:
        return None
    a, b = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    return sum((x - a) * (y - b) for x, y in points) / sum((x - a) ** 2 for x, _ in points)


def mean(values: Iterator[float] | Sequence[float]) -> float:
    """The geometric mean; zero where one is."""
    some = list(values)
    return geometric_mean(some) if some and min(some) > 0 else 0.0


def _sizes(rows: Sequence[Row]) -> list[float]:
    return sorted({row["factor"] for row in rows})


def _place(row: Row) -> tuple[Any, ...]:
    return row["layer"], row["n"], row["factor"], row["sample"]
