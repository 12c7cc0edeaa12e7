"""Layers and inputs that try to break a bound, and the truth about them: Jacobians in extended precision, by another route."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from howsmooth.errors import HowSmoothError
from howsmooth.maps import Attention, LayerNorm, RMSNorm, Rotary
from howsmooth.theory.at_point.table import point_bounds, trace_forms
from howsmooth.theory.over_ball.table import ball_bounds

Long = np.longdouble  # 64 bits of mantissa and no overflow to speak of where the machine has them
ROUNDING = 1e-9  # of a truth: what an SVD in float64 and float64 products behind a bound may lose
_SIZES = (1e-150, 1e-40, 1e-12, 1e-3, 1e3, 1e12, 1e40, 1e150)
_SIZES_SINGLE = (1e-30, 1e-12, 1e-6, 1e-3, 1e3, 1e6, 1e12, 1e25)


@dataclass(frozen=True)
class Hostile:
    """A layer, a batch of inputs for it, (items, n, d), all of length at most `radius`, and what it was made of."""

    layer: Attention
    x: Tensor
    radius: float
    name: str


def hostile(seed: int, items: int = 4) -> Hostile:
    """The layer and the inputs of that number: each option by its own chance."""
    r = np.random.default_rng(seed)
    double = bool(r.random() < 0.6)
    plain = bool(r.random() < 0.35)  # one head in the paper's notation: most published rows ask for it
    n, d = int(r.choice([1, 2, 3, 4, 6])), int(r.choice([1, 2, 3, 4, 5]))
    kv_heads, group = (1, 1) if plain else (int(r.choice([1, 1, 2])), int(r.choice([1, 2])))
    heads, head, d_v = kv_heads * group, d if plain else int(r.choice([1, 2, 3])), d if plain else int(r.choice([1, 2, 3]))
    names: list[str] = []

    def weight(role: str, rows: int, cols: int, odd: float = 0.5) -> np.ndarray:
        kind = str(r.choice(list(_KINDS))) if r.random() < odd else "gaussian"
        size = float(r.choice(_SIZES if double else _SIZES_SINGLE)) if r.random() < 0.12 else float(r.choice([0.3, 1.0, 3.0]))
        names.append(f"{role} {kind} {size:g}")
        return _KINDS[kind](r, rows, cols) * size

    w_q, w_v = weight("w_q", heads * head, d), weight("w_v", kv_heads * d_v, d)
    w_k = np.eye(d) if plain else weight("w_k", kv_heads * head, d)
    w_o = None if plain or r.random() < 0.3 else weight("w_o", int(r.choice([1, d, 4])), heads * d_v)
    if heads > 1 and r.random() < 0.4:  # heads that undo each other, or that differ by a sign
        names.append("opposed heads")
        w_q = np.concatenate([w_q[:head]] * heads) * np.repeat(r.choice([1, -1], heads), head)[:, None]
        if w_o is not None:
            w_o = np.concatenate([w_o[:, :d_v] * (-1) ** h for h in range(heads)], 1)
        elif kv_heads > 1:
            w_v = np.concatenate([w_v[:d_v] * (-1) ** h for h in range(kv_heads)])
    options, said = _options(r, n, d, heads, kv_heads, head, d_v, plain)
    dtype = torch.float64 if double else torch.float32
    tensors = {name: None if w is None else _fit(w, dtype) for name, w in (("w_q", w_q), ("w_v", w_v), ("w_o", w_o))}
    tensors["w_k"] = None if plain and r.random() < 0.5 else _fit(w_k, dtype)
    scale = 1.0 if plain else float(r.choice([head**-0.5, 1.0, -1.0, 0.0, 1e-8, 30.0], p=[0.6, 0.1, 0.1, 0.05, 0.05, 0.1]))
    layer = Attention(**tensors, heads=heads, kv_heads=kv_heads, scale=scale, **options).to(dtype)  # pyright: ignore[reportArgumentType]
    x, where = _tokens(r, items, n, d, double)
    x = _fit(x, dtype)
    radius = float(max(np.linalg.norm(t / (np.abs(t).max() or 1)) * (np.abs(t).max() or 1) for t in _rows(x))) * (1 + 1e-14)
    return Hostile(layer, x, radius, f"seed {seed}, {dtype}, n={n}, d={d}, {layer!r}: {', '.join([*names, said, where])}")


def _rows(x: Tensor) -> list[np.ndarray]:
    return list(x.double().flatten(0, 1).numpy())


def _fit(t: np.ndarray, dtype: torch.dtype) -> Tensor:
    top = float(torch.finfo(dtype).max)
    return torch.as_tensor(np.clip(t, -top, top)).to(dtype)


def _centred(r: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    """Rows that sum to zero: constants are in the kernel."""
    if rows == cols and r.random() < 0.5:
        return np.eye(rows) - 1 / rows
    g = r.standard_normal((rows, cols))
    return g - g.mean(1, keepdims=True)


def _cut(r: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    rank = int(r.integers(1, max(2, min(rows, cols))))
    return r.standard_normal((rows, rank)) @ r.standard_normal((rank, cols))


def _single(r: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    w = np.zeros((rows, cols))
    w[r.integers(rows), r.integers(cols)] = r.choice([1.0, -1.0])
    return w


_KINDS = {
    "gaussian": lambda r, m, k: r.standard_normal((m, k)),
    "zero": lambda r, m, k: np.zeros((m, k)),
    "rank one": lambda r, m, k: np.outer(r.choice([1.0, -1.0], m), r.choice([1.0, -1.0], k)),
    "cut": _cut,
    "kills constants": _centred,
    "constants killed behind": lambda r, m, k: _centred(r, k, m).T,
    "signs": lambda r, m, k: np.eye(m, k) * r.choice([1.0, -1.0], k),
    "single entry": _single,
    "difference": lambda r, m, k: np.outer([(-1.0) ** i for i in range(m)], np.eye(k)[0]),
    "uneven": lambda r, m, k: r.standard_normal((m, k)) * 10.0 ** r.uniform(-9, 9, (m, 1)),
    "shifted": lambda r, m, k: 1e4 + r.standard_normal((m, k)),
}


def _options(
    r: np.random.Generator, n: int, d: int, heads: int, kv_heads: int, head: int, d_v: int, plain: bool
) -> tuple[dict, str]:
    """Masks, biases, caps, norms and phases."""
    options: dict = {"causal": bool(r.random() < 0.4)}
    if plain and r.random() < 0.7:
        return options, ""

    def noise(*shape: int, size: float = 1.0) -> Tensor:
        return torch.as_tensor(r.standard_normal(shape) * size)

    for name, rows in (("b_q", heads * head), ("b_k", kv_heads * head), ("b_v", kv_heads * d_v)):
        if r.random() < 0.25:
            options[name] = noise(rows, size=float(r.choice([0.5, 5.0, 1e4])))
    if r.random() < 0.2:
        options["softcap"] = float(r.choice([0.5, 3.0, 50.0]))
    if r.random() < 0.15:
        options["window"] = int(r.integers(1, n + 2))
    if r.random() < 0.15:
        options["bias"] = noise(1, int(r.choice([1, heads])), n, n, size=float(r.choice([1.0, 50.0])))
        if r.random() < 0.5:
            options["bias"][torch.as_tensor(r.random(tuple(options["bias"].shape)) < 0.3)] = -torch.inf
    if r.random() < 0.3:
        for name in ("q_norm", "k_norm"):
            kind = int(r.integers(3))
            eps = float(r.choice([1e-6, 1e-3, 0.3]))
            if kind:
                weight = noise(head) * float(r.choice([1.0, 1.0, 1e-3, 1e3]))
                options[name] = RMSNorm(weight, eps=eps) if kind == 1 else LayerNorm(weight, noise(head), eps=eps)
    if head >= 2 and r.random() < 0.2:
        options["rotary"] = Rotary.from_base(2, n, base=100.0, interleaved=bool(r.random() < 0.5))
    return options, " ".join(k for k in options if k != "causal")


def _tokens(r: np.random.Generator, items: int, n: int, d: int, double: bool) -> tuple[np.ndarray, str]:
    """Inputs of one kind and size: tokens in general position, equal, opposed, in clusters, constant vectors, mostly zero."""
    size = float(r.choice(_SIZES if double else _SIZES_SINGLE)) if r.random() < 0.1 else float(r.choice([0.1, 1.0, 1.0, 5.0]))
    x = r.standard_normal((items, n, d))
    kind = str(r.choice(["gaussian", "equal", "opposed", "clusters", "constant", "far", "zero", "shifted"]))
    if kind == "equal":
        x[:] = x[:, :1]
    elif kind == "opposed":
        x[:] = x[:, :1] * r.choice([1.0, -1.0], (items, n, 1))
    elif kind == "clusters":
        x[:, n // 2 :] = x[:, -1:]
        x[:, : n // 2] = x[:, :1] / 2
    elif kind == "constant":
        x[:] = x[..., :1]
    elif kind == "far":
        x[:, 0] *= 100
    elif kind == "zero":
        x *= r.random((items, n, 1)) < 0.5
    elif kind == "shifted":
        x += 30
    return x * size, f"tokens {kind} {size:g}"


def largest_singular_value(layer: Attention, x: Tensor) -> np.ndarray:
    """`‖D_x f‖₂` at every input, (items,), from Proposition 1.1's formula in extended precision and a scaled SVD."""
    J = jacobians(layer, x)
    size = np.abs(J).max((1, 2))
    size = np.where(size > 0, size, Long(1))
    return np.linalg.norm((J / size[:, None, None]).astype(np.float64), 2, (1, 2)) * size


def jacobians(layer: Attention, x: Tensor) -> np.ndarray:
    """`D_x f`, (items, n·d_out, n·d), float80 where there is one. Differences are taken of tokens, before any product."""
    items, n, d = x.shape
    t, heads, kv = _long(x), layer.heads, layer.kv_heads
    w_q, w_v = _long(layer.w_q), _long(layer.w_v)
    w_k = np.eye(d, dtype=Long) if layer.w_k is None else _long(layer.w_k)
    w_o = np.eye(heads * len(w_v) // kv, dtype=Long) if layer.w_o is None else _long(layer.w_o)
    J = np.zeros((items, n, len(w_o), n, d), Long)
    for h in range(heads):
        g = h * kv // heads  # the group whose keys and values head h shares
        W, value = _part(w_o.T, h, heads).T, _part(w_v, g, kv)
        q, dq = _turned(layer, t, w_q, layer.b_q, layer.q_norm, h, heads)
        k, dk = _turned(layer, t, w_k, layer.b_k, layer.k_norm, g, kv)
        s = Long(layer.scale) * np.einsum("bik,bjk->bij", q, k)
        slope = np.ones_like(s)
        if layer.softcap is not None:
            cap = Long(layer.softcap)
            s, slope = cap * np.tanh(s / cap), 1 / np.cosh(np.clip(s / cap, -5000, 5000)) ** 2
        s = s + _visible(layer, n, h)
        with np.errstate(invalid="ignore"):
            p = np.exp(s - s.max(-1, keepdims=True))
        p = np.where(np.isfinite(s.max(-1, keepdims=True)), p, 0)
        total = p.sum(-1, keepdims=True)
        p = p / np.where(total > 0, total, 1)
        apart = t[:, :, None] - t[:, None]  # x_j − x_l
        u = np.einsum("bil,bjld->bijd", p, apart) @ value.T  # v_j − o_i
        Q = p * slope
        J += np.einsum("bij,od->biojd", p, W @ value)
        through_key = Long(layer.scale) * np.einsum("bik,bjkd->bijd", q, dk)
        J += np.einsum("bijo,bijd->biojd", Q[..., None] * (u @ W.T), through_key)
        centre = k.mean(1, keepdims=True) if layer.softcap is None else 0  # the same for all keys drops out
        query = Long(layer.scale) * np.einsum("bij,bijv,bjk->bivk", Q, u, k - centre)
        for i in range(n):
            J[:, i, :, i] += W @ query[:, i] @ dq[:, i]
    return J.reshape(items, n * len(w_o), n * d)


def _long(t: Tensor) -> np.ndarray:
    return t.detach().double().numpy().astype(Long)


def _part(w: np.ndarray | Tensor | None, index: int, parts: int) -> np.ndarray:
    """One of equal parts of the rows; zero where there are none."""
    if w is None:
        return np.zeros(1, Long)
    w = _long(w) if isinstance(w, Tensor) else w
    size = len(w) // parts
    return w[index * size : (index + 1) * size]


def _turned(
    layer: Attention, t: np.ndarray, w: np.ndarray, b: Tensor | None, norm: LayerNorm | RMSNorm | None, index: int, parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Queries or keys of a head, (items, n, head), and their derivatives in the token, (items, n, head, d)."""
    items, n, _ = t.shape
    head = len(w) // parts
    together = norm is not None and norm.width != head  # over all heads
    w, shift = (_part(part, 0, 1) if together else _part(part, index, parts) for part in (w, b))
    p = t @ w.T + shift
    dp = np.broadcast_to(w, (items, n, *w.shape))
    if norm is not None:
        size = w.shape[0]
        C = np.eye(size, dtype=Long) - (1 / Long(size) if isinstance(norm, LayerNorm) else 0)
        centred = np.einsum("kl,bnl->bnk", C, p)
        s = np.sqrt((centred**2).mean(-1, keepdims=True) + Long(norm.eps))
        unit, alpha = centred / s, _long(norm.weight)
        dp = np.einsum("kl,bnld->bnkd", C, dp)
        dp = (dp - np.einsum("bnk,bnl,bnld->bnkd", unit, unit, dp) / size) / s[..., None] * alpha[:, None]
        p = alpha * unit + (0 if norm.bias is None else _long(norm.bias))
    if together:
        own = slice(index * head, (index + 1) * head)
        p, dp = p[..., own], dp[..., own, :]
    if layer.rotary is not None:
        eye = layer.rotary.turn(torch.eye(head, dtype=torch.float64)[:, None].expand(-1, n, -1))  # (from, n, to)
        turn = eye.numpy().astype(Long)
        p, dp = np.einsum("lnk,bnl->bnk", turn, p), np.einsum("lnk,bnld->bnkd", turn, dp)
    return p, dp


def _visible(layer: Attention, n: int, h: int) -> np.ndarray:
    """What is added to the logits of a head: zero, the bias, −∞ where a key is hidden, (1 or items, n, n)."""
    i, j = np.arange(n)[:, None], np.arange(n)[None]
    hidden = (j > i) & layer.causal
    if layer.window is not None:
        hidden |= np.abs(i - j) >= layer.window
    added = np.where(hidden[None], -np.inf, 0.0).astype(Long)
    if layer.bias is not None:
        bias = _long(layer.bias)
        added = added + np.broadcast_to(bias, (len(bias), layer.heads, n, n))[:, h]
    return added


def worst_places(case: Hostile) -> Tensor:
    """Tokens on the sphere that are bad for the first head, (items, n, d) float64: `k` at `y`, the others at `x`, with
    `⟨A x + c, y − x⟩` large, by ascent from singular vectors, eigenvectors and random points; the tokens at `y` first."""
    layer, n = case.layer, case.x.shape[1]
    d, r = layer.width, np.random.default_rng(0)
    w = layer.by_head()
    A = (layer.scale * case.radius * case.radius * w.k[0].mT @ w.q[0]).numpy()
    c = (layer.scale * case.radius * w.k[0].mT @ w.b_q[0]).numpy()
    if n < 2 or not (np.abs(A).max() < 1e100 and np.abs(c).max() < 1e100):
        return torch.zeros(1, n, d, dtype=torch.float64)
    vectors = np.concatenate([np.linalg.svd(A)[2], np.linalg.eigh((A + A.T) / 2)[1].T, r.standard_normal((6, d))])
    x = np.concatenate([s * vectors for s in (1.0, -1.0, 0.5, -0.5)])
    step = 0.25 / max(float(np.linalg.norm(A, 2) + np.linalg.norm(c)), 1e-300)
    for _ in range(300):
        x = _unit(x + step * (_unit(x @ A.T + c, 0) @ A - x @ (A + A.T) - c))
    y = _unit(x @ A.T + c, 0)
    pairs = sorted(zip(x, y, strict=True), key=lambda xy: -float((A @ xy[0] + c) @ (xy[1] - xy[0])))[:6]
    tokens = [[y] * k + [x] * (n - k) for x, y in pairs for k in range(1, n)]
    return torch.as_tensor(np.array(tokens)) * (case.radius * (1 - 1e-14))


def _unit(x: np.ndarray, least: float = 1.0) -> np.ndarray:
    """Vectors divided by their length, or by `least` where that is more."""
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / np.maximum(np.maximum(length, least), 1e-300)


@dataclass
class Tally:
    """What was compared: inputs, comparisons with upper bounds and with lower ones, bounds of infinity, layers refused.

    wrong: a sentence for every bound that is refuted, or is no number.
    """

    layers: int = 0
    inputs: int = 0
    upper: int = 0
    lower: int = 0
    infinite: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)

    def above(self, what: str, log_bound: float, log_truth: float, case: Hostile) -> None:
        """Count an upper bound, and say so if it is below the truth or NaN."""
        self.upper += 1
        self.infinite += log_bound == math.inf
        if not log_bound >= log_truth - ROUNDING:
            self.wrong.append(f"{what}: upper bound e^{log_bound:.9g} of e^{log_truth:.9g}; {case.name}")

    def below(self, what: str, log_bound: float, log_truth: float, case: Hostile) -> None:
        """Count a lower bound, and say so if it is above the truth or NaN."""
        self.lower += 1
        if not log_bound <= log_truth + ROUNDING:
            self.wrong.append(f"{what}: lower bound e^{log_bound:.9g} of e^{log_truth:.9g}; {case.name}")


def at_points(case: Hostile, tally: Tally) -> list[float]:
    """Every bound at a point against the truth, at all inputs together and at the first alone; the logarithms of the truth."""
    truth = logs(largest_singular_value(case.layer, case.x))
    tally.layers, tally.inputs = tally.layers + 1, tally.inputs + len(truth)
    try:
        operator = case.layer.linearize(case.x)[1]
        rows = point_bounds(case.layer, case.x[0])
    except HowSmoothError:
        tally.refused += 1
        return truth
    for name, bounds in trace_forms(operator)._asdict().items():
        for bound, log_truth in zip(logs(bounds.numpy()), truth, strict=True):
            tally.above(f"at a point, {name}", bound, log_truth, case)
    for row in rows:
        if row.log_value is not None:
            tally.above(f"at a point, {row.id}", row.log_value, truth[0], case)
    return truth


def over_ball(case: Hostile, truth: list[float], tally: Tally) -> None:
    """Every bound over the ball against the inputs, against tokens that are bad by design, and against one another."""
    n = case.x.shape[1]
    places = worst_places(case)
    best = max(truth + logs(largest_singular_value(case.layer, places)))
    tally.layers, tally.inputs = tally.layers + 1, tally.inputs + len(places)
    try:
        rows = ball_bounds(case.layer, n, case.radius)
    except HowSmoothError:
        tally.refused += 1
        return
    upper = [row for row in rows if row.side == "upper" and row.log_value is not None]
    for row in upper:
        tally.above(f"over the ball, {row.id}", row.log_value or 0.0, best, case)
    free = min((row.log_value or 0.0 for row in upper if row.mean_field), default=math.inf)
    for row in rows:
        if row.side == "lower" and row.log_value is not None:
            tally.below(f"over the ball, {row.id}", row.log_value, free if row.mean_field else best, case)


def logs(values: np.ndarray) -> list[float]:
    """Natural logarithms, −∞ for zero; NaN stays NaN."""
    with np.errstate(divide="ignore"):
        return [float(np.log(v)) for v in values]
