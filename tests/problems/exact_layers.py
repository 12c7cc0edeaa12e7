"""The norm of a softmax attention layer's Jacobian in eighty digits, and layers whose products lose most of float64's sixteen.

Written out from the definition in `decimal`, with nothing of the package but the numbers that a layer and its tokens are.
"""

import math
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext

import numpy as np
import torch
from torch import Tensor

from howsmooth.errors import HowSmoothError
from howsmooth.kernels.kinds import Softmax
from howsmooth.maps import Attention, Composition, LayerNorm, Map, RMSNorm
from howsmooth.solve import Options, solve
from howsmooth.spectral import DenseSVD, Estimate, GolubKahan, Solver

from .hostile_layers import Tally, hostile

Exact = np.ndarray  # of Decimal
_DIGITS = 80
_SVD = Decimal("1e-13")  # what a decomposition in float64 loses of a norm
SOLVERS: dict[str, Solver] = {
    "dense": DenseSVD(),
    "products": GolubKahan(),
    "rigorous": GolubKahan(rigorous=True),
}


def exact(t: Tensor) -> Exact:
    """The same numbers."""
    return np.array([Decimal(a) for a in t.detach().double().flatten().tolist()], object).reshape(tuple(t.shape))


def jacobian(f: Map, x: Tensor) -> Exact:
    """`D_x f` of attention, or of attention after a norm, (n·d_out, n·d)."""
    with localcontext(prec=_DIGITS):
        if isinstance(f, Composition):
            assert isinstance(f.inner, LayerNorm | RMSNorm)
            y, slopes = _normed(f.inner, exact(x))
            J = _attention(f.outer, y)
            return np.concatenate([J[:, :, j] @ slopes[j] for j in range(len(y))], -1).reshape(J.shape[0] * J.shape[1], -1)
        J = _attention(f, exact(x))
        return J.reshape(J.shape[0] * J.shape[1], -1)


def norm(J: Exact) -> Decimal:
    """The largest singular value."""
    size = max(abs(a) for a in J.flat)
    if not size:
        return size
    return Decimal(float(np.linalg.norm((J / size).astype(float), 2))) * size


def stretch(J: Exact, v: Tensor) -> Decimal:
    """`|J v|/|v|`."""
    with localcontext(prec=_DIGITS):
        image, along = (sum((a * a for a in t), Decimal(0)) for t in (J @ exact(v).ravel(), exact(v).ravel()))
        return (image / along).sqrt()


def _attention(layer: Map, x: Exact) -> Exact:
    """(n, d_out, n, d)."""
    assert isinstance(layer, Attention)
    assert isinstance(layer.kind, Softmax)
    n, d = x.shape
    eye = torch.eye(d)
    w_k = eye if layer.w_k is None else layer.w_k
    o_width = layer.w_v.shape[0] // layer.kv_heads * layer.heads
    w_o = exact(torch.eye(o_width) if layer.w_o is None else layer.w_o)
    J = np.full((n, len(w_o), n, d), Decimal(0), object)
    for h in range(layer.heads):
        g = h * layer.kv_heads // layer.heads
        q, dq = _side(layer, layer.w_q, layer.b_q, layer.q_norm, h, layer.heads, x)
        k, dk = _side(layer, w_k, layer.b_k, layer.k_norm, g, layer.kv_heads, x)
        w_v = _part(exact(layer.w_v), g, layer.kv_heads)
        v = x @ w_v.T + (0 if layer.b_v is None else _part(exact(layer.b_v), g, layer.kv_heads))
        out = _part(w_o.T, h, layer.heads).T
        scale = Decimal(layer.scale)
        for i in range(n):
            p, slope = _weights(layer, h, i, scale * (k @ q[i]))
            o = p @ v
            paid = (p * slope)[:, None] * (v - o)  # (n, d_v)
            J[i, :, i] += out @ (paid.T @ (scale * (k @ dq[i])))
            for j in range(n):
                J[i, :, j] += out @ (np.outer(paid[j], scale * (q[i] @ dk[j])) + p[j] * w_v)
    return J


def _weights(layer: Attention, h: int, i: int, s: Exact) -> tuple[Exact, Exact]:
    """A row of weights, and the slopes of its soft-cap."""
    slope = np.full(len(s), Decimal(1), object)
    if layer.softcap is not None:
        cap = Decimal(layer.softcap)
        e = [_exp(-2 * abs(a / cap)) for a in s]
        s = np.array([cap * (1 - b) / (1 + b) * (1 if a > 0 else -1) for a, b in zip(s, e, strict=True)], object)
        slope = np.array([4 * b / (1 + b) ** 2 for b in e], object)
    window = len(s) if layer.window is None else layer.window
    there = np.array([not (layer.causal and j > i) and abs(i - j) < window for j in range(len(s))])
    if layer.bias is not None:
        bias = layer.bias.double()
        row = bias.expand(bias.shape[0], layer.heads, *bias.shape[2:])[0, h].expand(len(s), len(s))[i]
        there &= ~torch.isneginf(row).numpy()
        s = s + exact(row.masked_fill(row.isneginf(), 0.0))
    if not there.any():
        return np.full(len(s), Decimal(0), object), slope
    assert isinstance(layer.kind, Softmax)
    sink = [] if layer.kind.sink is None else [Decimal(float(layer.kind.sink[h]))]
    most = max([*s[there], *sink])
    p = np.array([_exp(a - most) if visible else Decimal(0) for a, visible in zip(s, there, strict=True)], object)
    return p / (p.sum() + sum(_exp(a - most) for a in sink)), slope


def _side(
    layer: Attention, w: Tensor, b: Tensor | None, norm: LayerNorm | RMSNorm | None, index: int, parts: int, x: Exact
) -> tuple[Exact, Exact]:
    """Queries or keys of a head, (n, head), and their derivatives in their tokens, (n, head, d)."""
    n, own = len(x), _part(exact(w), index, parts)
    rows = x @ own.T + (0 if b is None else _part(exact(b), index, parts))
    slopes = np.stack([own] * n)
    if norm is not None:
        rows, inner = _normed(norm, rows)
        slopes = np.stack([a @ own for a in inner])
    if layer.rotary is not None:
        head = len(own)
        turn = exact(layer.rotary.turn(torch.eye(head, dtype=torch.float64)[:, None].expand(-1, n, -1)))  # (from, n, to)
        rows = np.stack([rows[i] @ turn[:, i] for i in range(n)])
        slopes = np.stack([turn[:, i].T @ slopes[i] for i in range(n)])
    return rows, slopes


def _normed(norm: LayerNorm | RMSNorm, x: Exact) -> tuple[Exact, Exact]:
    """Rows behind a norm, (n, d), and its derivative at each, (n, d, d)."""
    n, d = x.shape
    centre = exact(torch.eye(d)) - (Decimal(1) / d if isinstance(norm, LayerNorm) else 0)
    c, weight = x @ centre, exact(norm.weight)
    s = [((a @ a) / d + Decimal(norm.eps)).sqrt() for a in c]
    u = np.stack([a / b for a, b in zip(c, s, strict=True)])
    slopes = [weight[:, None] * (centre - np.outer(u[i], u[i]) / d) / s[i] for i in range(n)]
    return weight * u + (0 if norm.bias is None else exact(norm.bias)), np.stack(slopes)


def _part(w: Exact, index: int, parts: int) -> Exact:
    size = len(w) // parts
    return w[index * size : (index + 1) * size]


def _exp(a: Decimal) -> Decimal:
    return a.exp() if a > -100_000 else Decimal(0)


def cancelling(seed: int) -> tuple[Map, Tensor, str]:
    """A layer whose products cancel, its tokens, and what cancels: heads, up to a share or to the last digit, or a bias."""
    random = torch.Generator().manual_seed(seed)
    n, d, norms = 2 + seed % 3, 1 + seed // 3 % 3, seed % 5 == 4

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    w_q, w_k, w_v, w_o, x = draw(d, d), draw(d, d), draw(d, d), draw(d, d), draw(n, d)
    what = ("heads to 1e-9", "heads to 1e-15", "heads", "bias 1e12", "bias 1e6", "keys shared")[seed // 9 % 6]
    options: dict = {"causal": seed % 2 == 1}
    if what.startswith("bias"):
        layer = Attention(w_q, w_k, w_v, w_o, b_v=float(what[5:]) * draw(d), **options)
    elif what == "keys shared":  # two query heads that read the same keys and values
        near = w_q * (1 + 1e-9 * draw(d, d))
        layer = Attention(torch.cat([w_q, near]), w_k, w_v, torch.cat([w_o, -w_o], 1), heads=2, kv_heads=1, **options)
    else:
        share = float(what[9:] or 0)
        near = w_v * (1 + share * draw(d, d))
        both = torch.cat([w_q, w_q]), torch.cat([w_k, w_k]), torch.cat([w_v, near]), torch.cat([w_o, -w_o], 1)
        layer = Attention(*both, heads=2, **options)
    if seed % 4 == 3:
        layer = replace(layer, softcap=2.0)
    f = layer @ LayerNorm(1 + 0.1 * draw(d), eps=1e-3) if norms and d > 1 else layer
    return f, x, f"seed {seed}, n={n}, d={d}, {what} cancel, {f!r}"


@dataclass
class Ends(Tally):
    """What was compared: both ends of intervals. zero: lower ends of zero.  refused: intervals, not layers.

    wrong: a sentence for every interval that leaves out the norm, or its own value.
    """

    zero: int = 0

    def compare(self, found: Estimate, J: Exact, what: str) -> None:
        """Count an interval, and say so where it is wrong."""
        truth, attained = norm(J), stretch(J, found.direction)
        self.upper, self.lower = self.upper + 1, self.lower + 1
        self.zero += found.lower == 0
        self.infinite += found.upper == math.inf
        room = 1 + _SVD
        if not 0 <= found.lower <= found.value <= found.upper:
            self.wrong.append(f"expected lower ≤ value ≤ upper, got {found!r}; {what}")
        elif not Decimal(found.lower) <= min(truth * room, attained):
            self.wrong.append(f"lower end {found.lower!r} of {truth:.18e}, {attained:.18e} along its direction; {what}")
        elif math.isfinite(found.upper) and not truth <= Decimal(found.upper) * room:
            self.wrong.append(f"upper end {found.upper!r} of {truth:.18e}; {what}")

    def examine(self, f: Map, x: Tensor, what: str) -> None:
        """Every solver on a map at one input."""
        J = jacobian(f, x)
        self.layers, self.inputs = self.layers + 1, self.inputs + 1
        for name, solver in SOLVERS.items():
            try:
                found = solve(f, x, Options(solver=solver)).estimate
            except HowSmoothError:
                self.refused += 1
                continue
            self.compare(found, J, f"{name}, {what}")


def all_ends(count: int, first: int = 0) -> Ends:
    """So many layers that cancel, and as many hostile ones of `problems.hostile_layers`, each at one input."""
    ends = Ends()
    for seed in range(first, first + count):
        ends.examine(*cancelling(seed))
        case = hostile(seed, items=1)
        ends.examine(case.layer, case.x[0], case.name)
    return ends
