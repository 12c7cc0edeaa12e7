"""Layers of every kind of attention, and inputs that try to break their bounds: over the ball and at a point."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from howsmooth.errors import HowSmoothError
from howsmooth.kernels import kinds
from howsmooth.maps import Attention, AutodiffJacobian, LayerNorm, RMSNorm, Rotary
from howsmooth.theory.bound import Bound
from howsmooth.theory.constants import constants
from howsmooth.theory.kinds.block_norms import point_of_kind
from howsmooth.theory.kinds.clusters import best_clusters, clusters
from howsmooth.theory.over_ball.table import softmax_rows, upper_rows

F64 = torch.float64
ROUNDING = 1e-8  # of a measured L: float64 products, logits of some hundreds, and an SVD
INPUTS = 50  # of a layer
AT_A_POINT = 2  # of them
_OFF = 1e-6  # how far closed form and autodiff may be apart before a case says nothing

Random = np.random.Generator


@dataclass(frozen=True)
class KindCase:
    """A layer, inputs for it, (inputs, n, d), all of length at most `radius`, and what it was made of."""

    layer: Attention
    x: Tensor
    radius: float
    name: str

    @property
    def noise(self) -> float:
        """What rounding may leave of a derivative whose terms cancel."""
        w = self.layer.by_head()
        b_v = 0.0 if self.layer.b_v is None else float(self.layer.b_v.norm())
        moved = 1 + float(w.q.norm() + w.k.norm()) * (self.radius + 1)
        return 1e-13 * float(w.o.norm()) * (float(w.v.norm()) * (1 + self.radius) + b_v) * moved


@dataclass
class KindTally:
    """What was compared: layers, inputs, comparisons with upper and lower bounds, bounds of infinity, cases refused.

    wrong: a sentence for every bound that is refuted, or is no number.  tightest: the largest L/bound of every upper row.
    """

    layers: int = 0
    inputs: int = 0
    upper: int = 0
    lower: int = 0
    infinite: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    tightest: dict[str, float] = field(default_factory=dict)


def _sink(r: Random, heads: int) -> kinds.Kind:
    return kinds.Softmax(torch.as_tensor(r.standard_normal(heads) * float(r.choice([0.5, 3.0, 30.0]))))


# what is drawn under each name
KINDS: dict[str, Callable[[Random, int], kinds.Kind]] = {
    "softmax with a sink": _sink,
    "sigmoid": lambda r, heads: kinds.Sigmoid(None if r.random() < 0.6 else float(r.choice([-5.0, -1.0, 0.0, 2.0]))),
    "L2": lambda r, heads: kinds.L2(tied=bool(r.random() < 0.6)),
    "cosine": lambda r, heads: kinds.Cosine(
        epsilon=float(r.choice([1e-6, 1e-2, 0.5, 3.0])), values=bool(r.random() < 0.5), factor=float(r.choice([1.0, -0.3]))
    ),
    "linear": lambda r, heads: kinds.Linear("elu" if r.random() < 0.7 else "relu", normalized=bool(r.random() < 0.6)),
    "Sinkhorn": lambda r, heads: kinds.Sinkhorn(None if r.random() < 0.4 else int(r.choice([1, 2, 3, 4, 5, 8]))),
    "differential": lambda r, heads: kinds.Differential(
        float(r.choice([0.0, 0.5, 0.8, -1.5])),
        epsilon=None if r.random() < 0.6 else float(r.choice([1e-5, 1e-1])),
        factor=float(r.choice([1.0, 0.2])),
    ),
    "hard": lambda r, heads: kinds.Hard(int(r.choice([1, 1, 2, 3, 9]))),
}


def draw(name: str, seed: int) -> KindCase:
    """The case of that number."""
    r = np.random.default_rng([list(KINDS).index(name), seed])
    n, d = int(r.choice([1, 2, 3, 4, 5, 7])), int(r.choice([1, 2, 2, 3]))
    plain = bool(r.random() < 0.3)  # one head without extras: most published rows ask for it
    kv_heads, group = (1, 1) if plain else (int(r.choice([1, 1, 2])), int(r.choice([1, 1, 2])))
    heads = kv_heads * group
    kind = KINDS[name](r, heads)
    if isinstance(kind, kinds.L2) and kind.tied:
        kv_heads = heads
    head, d_v = int(r.choice([1, 2, 3])) * kind.parts, d if plain else int(r.choice([1, 2, 3]))
    size = float(r.choice([0.03, 0.3, 1.0, 1.0, 3.0, 10.0]))

    def weight(rows: int, cols: int) -> Tensor:
        form = str(r.choice(["gaussian", "gaussian", "signs", "rank one", "zero", "swap"], p=[0.4, 0.2, 0.15, 0.1, 0.05, 0.1]))
        w = r.standard_normal((rows, cols))
        if form == "signs":
            w = np.eye(rows, cols) * r.choice([1.0, -1.0])
        elif form == "rank one":
            w = np.outer(r.choice([1.0, -1.0], rows), r.standard_normal(cols))
        elif form == "zero":
            w = np.zeros((rows, cols))
        elif form == "swap":
            w = np.eye(rows, cols)[:, ::-1].copy()
        return torch.as_tensor(w)

    w_q = size * weight(heads * head, d)
    w_k = None if isinstance(kind, kinds.L2) and kind.tied else size * weight(kv_heads * head, d)
    if w_k is not None and w_k.shape == w_q.shape and r.random() < 0.3:
        w_k = w_q * float(r.choice([1.0, -1.0]))
    w_v = weight(kv_heads * d_v, d) * float(r.choice([1.0, 1.0, 1e-3, 30.0]))
    if isinstance(kind, kinds.L2) and kind.tied and r.random() < 0.4:  # values that are a function of the queries
        d_v = head
        w_v = torch.cat([weight(head, head) @ w_q[h * head : (h + 1) * head] for h in range(heads)])
    w_o = None if plain or r.random() < 0.3 else weight(int(r.choice([1, d, 4])), heads * d_v)
    options = {} if plain else _options(r, kind, n, heads, kv_heads, head // kind.parts, d_v)
    if isinstance(kind, kinds.L2) and kind.tied:
        options.pop("b_k", None)
        options.pop("q_norm", None)
        options.pop("k_norm", None)
    scale = None if isinstance(kind, kinds.Linear) or r.random() < 0.5 else float(r.choice([1.0, 0.3, 5.0, -1.0, 0.0]))
    layer = Attention(w_q, w_k, w_v, w_o, heads=heads, kv_heads=kv_heads, scale=scale, kind=kind, **options)  # pyright: ignore[reportArgumentType]
    x, where = _inputs(r, layer, n, d)
    radius = float(x.norm(dim=-1).max()) * (1 + 1e-14)
    return KindCase(layer, x, radius, f"{name}, seed {seed}: {layer!r}, n={n}, R={radius:.3g}, {where}, {sorted(options)}")


def _options(r: Random, kind: kinds.Kind, n: int, heads: int, kv_heads: int, part: int, d_v: int) -> dict:
    def noise(*shape: int, size: float = 1.0) -> Tensor:
        return torch.as_tensor(r.standard_normal(shape) * size)

    options: dict = {}
    for name, rows in (("b_q", heads * part * kind.parts), ("b_k", kv_heads * part * kind.parts), ("b_v", kv_heads * d_v)):
        if r.random() < 0.25:
            options[name] = noise(rows, size=float(r.choice([0.5, 5.0])))
    balanced = isinstance(kind, kinds.Sinkhorn)
    if r.random() < 0.3 and not balanced:
        options["causal"] = True
    if r.random() < 0.15:
        options["window"] = int(r.integers(1, n + 2))
    if r.random() < 0.15 and not isinstance(kind, kinds.L2 | kinds.Linear):
        options["softcap"] = float(r.choice([0.5, 3.0]))
    if r.random() < 0.15 and not isinstance(kind, kinds.Linear):
        options["bias"] = noise(1, int(r.choice([1, heads])), n, n, size=float(r.choice([1.0, 8.0])))
        if r.random() < 0.4 and not balanced:
            options["bias"][torch.as_tensor(r.random(tuple(options["bias"].shape)) < 0.3)] = -torch.inf
    if r.random() < 0.15:
        options["attention_mask"] = torch.as_tensor(r.random((1, n)) < 0.7).index_fill(1, torch.tensor([0]), True)
    if r.random() < 0.2:
        for name in ("q_norm", "k_norm"):
            which, eps = int(r.integers(3)), float(r.choice([1e-3, 0.3]))
            if which:
                options[name] = RMSNorm(noise(part), eps=eps) if which == 1 else LayerNorm(noise(part), noise(part), eps=eps)
    if part >= 2 and r.random() < 0.15:
        options["rotary"] = Rotary.from_base(2, n, base=100.0)
    return options


def _inputs(r: Random, layer: Attention, n: int, d: int) -> tuple[Tensor, str]:
    """Inputs of many forms and one size: in general position, equal, opposed, clusters at singular vectors, near ties."""
    size = float(r.choice([1e-3, 0.1, 1.0, 1.0, 3.0, 10.0]))
    x = r.standard_normal((INPUTS, n, d))
    w = layer.by_head()
    A = (w.k[0].mT @ w.q[0]).numpy()
    left, _, right = np.linalg.svd(A)
    units = np.concatenate([right[:1], left.T[:1], np.linalg.eigh((A + A.T) / 2)[1].T])
    for k in range(1, INPUTS):
        u, v = units[r.integers(len(units))], units[r.integers(len(units))]
        few = int(r.integers(0, n + 1))
        form = k % 8
        if form == 1:
            x[k] = x[k, :1]
        elif form == 2:
            x[k] = x[k, :1] * r.choice([1.0, -1.0], (n, 1))
        elif form == 3:
            x[k] = u
        elif form == 4:
            x[k, :few], x[k, few:] = u, v * r.choice([1.0, -1.0, 0.5, 0.0])
        elif form == 5:
            x[k, :few], x[k, few:] = u, -u
        elif form == 6:
            x[k] = u * r.choice([1.0, -1.0], (n, 1))
            x[k, 0] = 0
        elif form == 7:
            x[k] *= r.random((n, 1)) < 0.5
            x[k, -1] = x[k, 0] + 1e-9
    if r.random() < 0.7:
        x /= np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-300) ** float(r.choice([0.0, 1.0]))
    return torch.as_tensor(x * size), f"size {size:g}"


def largest_singular_values(layer: Attention, x: Tensor) -> Tensor:
    """`‖D_x f‖₂` at every input, dense; infinity where it is no number."""
    if layer.attention_mask is not None:
        layer = replace(layer, attention_mask=layer.attention_mask.expand(len(x), -1))
    J = layer.linearize(x)[1].dense()
    return torch.linalg.matrix_norm(torch.where(J.isfinite(), J, 0.0), ord=2)


def autodiff_agrees(layer: Attention, x: Tensor, noise: float) -> bool:
    """Whether the plain value of the layer, differentiated automatically, has the same norm at one input."""
    try:
        closed = float(largest_singular_values(layer, x[None]))
        J = AutodiffJacobian(lambda t: layer.value(t[None])[0] + 0.0 * t.sum(), x, batched=False, checked=False).dense()[0]
    except HowSmoothError:  # what does not converge, or leaves the range
        return True
    plain = float(torch.linalg.matrix_norm(J, ord=2))
    return abs(plain - closed) <= _OFF * max(plain, closed) + noise


LOWER_EVERY, AUTODIFF_EVERY = 10, 20  # layers


def fuzz(name: str, seeds: range, inputs: float = math.inf, make: Callable[[str, int], KindCase] = draw) -> KindTally:
    """The cases of these numbers of one kind, until so many inputs were compared or a bound is refuted.

    make: what draws a case from a name and a number.
    """
    tally = KindTally()
    for seed in seeds:
        try:
            case = make(name, seed)
        except HowSmoothError:
            tally.refused += 1
            continue
        examine(case, tally, lower=seed % LOWER_EVERY == 0)
        if seed % AUTODIFF_EVERY == 0 and not autodiff_agrees(case.layer, case.x[0], case.noise):
            tally.wrong.append(f"closed form and autodiff disagree: {case.name}")
        if tally.inputs >= inputs or tally.wrong:
            break
    return tally


def examine(
    case: KindCase, tally: KindTally, *, alter: Callable[[list[Bound]], list[Bound]] = list, lower: bool = False
) -> None:
    """Compare every bound of a case with what is measured. alter: done to the rows first.  lower: look at clusters too."""
    layer, x, n = case.layer, case.x, case.x.shape[1]
    try:
        measured = largest_singular_values(layer, x)
        over = alter(_rows(layer, n, case.radius))
    except HowSmoothError:
        tally.refused += 1
        return
    tally.layers += 1
    tally.inputs += len(x)
    _compare(case, over, float(measured.max()), tally)
    for k in range(0, len(x), len(x) // AT_A_POINT):
        _compare(case, alter(point_of_kind(layer, x[k])), float(measured[k]), tally)
    rows = alter([clusters(constants(layer), n, case.radius)]) if lower else []
    if rows and rows[0].applies:
        _, points, counts = best_clusters(layer, n, case.radius)
        tokens = points.repeat_interleave(counts.round().long(), 0)[None]
        reached = float(largest_singular_values(layer, tokens))
        tally.lower += 1
        if not (rows[0].value or 0.0) <= reached * (1 + ROUNDING) + 1e-300:
            tally.wrong.append(f"{rows[0].id} {rows[0].value} above {reached} at its clusters: {case.name}")
        if float(tokens.norm(dim=-1).max()) > case.radius:
            tally.wrong.append(f"clusters outside the ball: {case.name}")
        _compare(case, over, reached, tally)


def _rows(layer: Attention, n: int, radius: float) -> list[Bound]:
    """Upper bounds over the ball: of softmax where the kind is softmax, with a sink."""
    made = constants(layer)
    if isinstance(layer.kind, kinds.Softmax):
        return [b for b in softmax_rows(made, n, radius) if b.side == "upper"]
    return upper_rows(made, n, radius)


def _compare(case: KindCase, rows: list[Bound], L: float, tally: KindTally) -> None:
    for b in rows:
        if b.log_value is None or b.side == "lower":
            continue
        assert b.value is not None
        tally.upper += 1
        tally.infinite += math.isinf(b.value)
        if math.isnan(b.log_value) or not b.value >= L * (1 - ROUNDING) - case.noise:
            tally.wrong.append(f"{b.id} {b.value} below {L}: {case.name}")
        elif case.noise * 1e3 < L < math.inf:
            tally.tightest[b.id] = max(tally.tightest.get(b.id, 0.0), L / b.value)
