"""How a kind of attention is put into a layer: with its source's own scale, or with the one that makes weights as sharp.

A kind comes as its source has it (`published`), and with the scale at which its weights have the mean entropy of softmax's on
the same tokens (`matched`), so that attention as sharp as the model's own is compared. One scale per layer and kind, found on
the first sample; docs/howto/variants.md says what it means for kinds whose weights are no shares.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor

from howsmooth.errors import HowSmoothError
from howsmooth.kernels import Mask, Scores, plain_attention
from howsmooth.kernels.kinds import L2, Cosine, Differential, Hard, Kind, Linear, Sigmoid, Sinkhorn, Softmax
from howsmooth.maps import Attention
from howsmooth.models import Capture
from howsmooth.settings import choice, items
from howsmooth.study.jobs import Cells, Job, Row, rare
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Part, Setting, fitting_lengths, parts, task_of_part

LONGEST = 256  # tokens up to which weights are written down to find a scale
_NAMES = "a list of kinds of attention"
_DOUBLINGS = 12  # of the published scale, either way, between which a scale is looked for
_HALVINGS = 14  # of a factor of two: a scale to four digits
_REPEATS = 7  # of a timed pair, the quickest counts
_CLOSE = 0.01  # nats within which two mean entropies are the same


def _lam(layer: int) -> float:
    """`λ` of differential attention as its paper starts to train it."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


KindName = Literal[
    "softmax", "sigmoid", "l2", "cosine", "linear", "sinkhorn", "differential", "hard", "l2-tied",
    "cosine-values", "linear-relu", "linear-sum", "differential-plain", "balanced",
]  # fmt: skip

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
USUAL: tuple[KindName, ...] = get_args(KindName)[:8]


@final
@dataclass(frozen=True, kw_only=True)
class ChoiceRow(Row):
    """How a kind of attention is put into a layer.

    way: `published`, `matched`, or `both` of softmax.  scale, entropy: its scale, and the mean entropy of its weights there.
    target: softmax's entropy.  matched: whether the two are the same.
    """

    kind = "choice"
    variant: str
    way: str
    scale: float
    entropy: float
    target: float
    matched: bool


@final
@dataclass(frozen=True, kw_only=True)
class LeftOutRow(Row):
    """A kind of attention that a layer has no form for, and why."""

    kind = "left out"
    variant: str
    way: str | None = rare()
    factor: float | None = rare()
    reason: str


def kind_names(names: Sequence[str] | None) -> tuple[KindName, ...]:
    """Kinds to compare, checked, softmax first: all others are set against it."""
    if names is None:
        return USUAL
    given = items(names, _NAMES, f"choose from {', '.join(KINDS)}")
    known: tuple[KindName, ...] = get_args(KindName)
    return tuple(dict.fromkeys(("softmax", *(choice(name, "kinds of attention", known) for name in given))))


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
    if setting.scope.map != "attention":
        return []
    there = [setting.nearest(LONGEST)]
    return [part.job(choose_scales, kinds=list(names)) for part in parts(setting, there, samples=1, layers=1)]


@task_of_part
def choose_scales(reader: Reader, part: Part, kinds: list[str]) -> Iterator[ChoiceRow | LeftOutRow]:
    """A row for every kind and way, with its scale and entropy, or why the layer has no form for it."""
    captured, (layer,) = part.capture(reader), part.layers
    attn, x = closed_form(captured[0], layer), captured[0].tokens(layer)
    about: Cells = {"model": captured.model, "layer": layer, "n": part.n}
    target = mean_entropy(put_in(attn, Softmax()), x)
    for name in kinds:
        try:
            for way, scale, entropy in _ways(put_in(attn, KINDS[name](layer)), x, target, name):
                matched = way != "published" and abs(entropy - target) <= _CLOSE
                found = {"scale": scale, "entropy": entropy, "target": target, "matched": matched}
                yield ChoiceRow(**about, variant=name, way=way, **found)
        except HowSmoothError as error:
            yield LeftOutRow(**about, variant=name, reason=str(error))


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


def usual_lengths(reader: Reader, samples: int) -> tuple[int, ...]:
    """Powers of two from 16 to 128 that model and text allow, or the shortest usual length."""
    fitting = fitting_lengths(reader, samples)
    return tuple(n for n in fitting if n in (16, 32, 64, 128)) or fitting[:1]


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
