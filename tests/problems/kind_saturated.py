"""Layers of sigmoid attention with logits of 10 to 800 of either sign, and values large enough that slopes of `e^−|s|` show."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import HowSmoothError
from howsmooth.kernels.kinds import Sigmoid
from howsmooth.maps import Attention
from howsmooth.theory.constants import constants
from howsmooth.theory.kinds.block_norms import point_of_kind
from howsmooth.theory.over_ball.table import upper_rows

from .kind_cases import F64, KindTally

LOGITS = [10.0, 16.0, 25.0, 36.0, 42.0, 60.0, 100.0, 300.0, 600.0, 700.0, 800.0]
INPUTS = 4  # of a layer
_ROUNDING = 1e-9  # of the terms of a derivative: a logit of 800 turns its roundings into as many of its slope
_UNDERFLOW = 1e-300  # of what slopes are multiplied by


@dataclass(frozen=True)
class Saturated:
    """A layer, inputs for it, (inputs, n, d), and what it was made of."""

    layer: Attention
    x: Tensor
    name: str


def draw(seed: int) -> Saturated:
    """The case of that number: logits are large by a bias of all, or by queries and keys."""
    r = np.random.default_rng([77, seed])
    n, d, heads = int(r.choice([1, 2, 3, 5])), int(r.choice([1, 2, 3])), int(r.choice([1, 1, 2]))
    logit, sign, by_bias = float(r.choice(LOGITS)), float(r.choice([1.0, -1.0])), bool(r.random() < 0.5)
    cap = float(r.choice([0.7, 5.0, 50.0])) if r.random() < 0.2 else None

    def noise(*shape: int, size: float = 1.0) -> Tensor:
        return torch.as_tensor(r.standard_normal(shape) * size)

    x = torch.nn.functional.normalize(noise(INPUTS, n, d), dim=-1)
    x[1] = x[1, :1]
    x[2] = x[2, :1] * torch.as_tensor(r.choice([1.0, -1.0], (n, 1)))
    w_q = noise(heads * d, d, size=0.3)
    w_k = w_q + noise(heads * d, d, size=0.01)
    if not by_bias:
        root = math.sqrt(logit)
        w_q, w_k = (torch.linalg.qr(w.unflatten(0, (heads, d)))[0].flatten(0, 1) * root for w in (w_q, w_k))
        w_k = w_q * sign if r.random() < 0.7 else w_k
    bias = sign * logit if by_bias else float(r.choice([0.0, 1.0]))
    flat = logit if cap is None or by_bias else min(logit, cap) + 2 * logit / cap
    b_v = noise(heads * 2) * math.exp(min(flat, 690.0))
    w_v = noise(heads * 2, d) * float(r.choice([0.0, 0.0, 1e-3, 1.0]))
    options: dict = {}
    if r.random() < 0.3:
        options["causal"] = True
    if r.random() < 0.15:
        options["window"] = int(r.integers(1, n + 2))
    if r.random() < 0.2:
        options["bias"] = noise(1, heads, n, n)
        options["bias"][torch.as_tensor(r.random((1, heads, n, n)) < 0.3)] = -torch.inf
    w_o = None if r.random() < 0.5 else noise(2, heads * 2)
    layer = Attention(
        w_q, w_k, w_v, w_o, heads=heads, scale=1.0, b_v=b_v, softcap=cap, kind=Sigmoid(bias), **options
    )  # fmt: skip
    return Saturated(layer, x, f"saturated, seed {seed}: {layer!r}, logit {sign * logit:g}, cap {cap}, {sorted(options)}")


def derivative(layer: Attention, x: Tensor) -> tuple[Tensor, float]:
    """`D_x f` of such a layer written out, (n·d_out, n·d), with `σ'(s) = e/(1 + e)²`, and the size of its terms."""
    n, d, bias = len(x), x.shape[1], layer.kind.bias  # pyright: ignore[reportAttributeAccessIssue]
    i = torch.arange(n)
    seen = torch.ones(n, n, dtype=torch.bool)
    if layer.causal:
        seen &= i[:, None] >= i
    if layer.window is not None:
        seen &= (i[:, None] - i).abs() < layer.window
    w, J, size, eye = layer.by_head(), torch.zeros(n, layer.out_width, n, d, dtype=F64), 0.0, torch.eye(n, dtype=F64)
    for h in range(layer.heads):
        q, k, v = x @ w.q[h].mT, x @ w.k[h].mT, x @ w.v[h].mT + layer.b_v.unflatten(0, (layer.heads, -1))[h]  # pyright: ignore[reportOptionalMemberAccess]
        u = q @ k.mT
        s, turn = u, torch.ones_like(u)
        if layer.softcap is not None:
            s = layer.softcap * torch.tanh(u / layer.softcap)
            e = torch.exp(-2 * (u / layer.softcap).abs())
            turn = 4 * e / (1 + e) ** 2
        see = seen
        if layer.bias is not None:
            added = layer.bias[0, h % layer.bias.shape[1]]
            see, s = seen & added.isfinite(), s + torch.where(added.isfinite(), added, 0.0)
        s = s + bias
        e = torch.exp(-s.abs())
        P, slope = torch.where(s < 0, e, 1.0) / (1 + e) * see, e / (1 + e) ** 2 * turn * see
        out = torch.eye(layer.out_width, dtype=F64) if layer.w_o is None else layer.w_o
        out = out.unflatten(1, (layer.heads, -1))[:, h]  # (d_out, d_v)
        value, logits = out @ w.v[h], v @ out.mT  # (d_out, d), (n, d_out)
        J += torch.einsum("il,oa->iola", P, value)
        J += torch.einsum("ij,jo,ja,il->iola", slope, logits, k @ w.q[h], eye)
        J += torch.einsum("il,lo,ia->iola", slope, logits, q @ w.k[h])
        moved = logits.abs().sum(-1) * ((k @ w.q[h]).norm(dim=-1) + (q @ w.k[h]).norm(dim=-1).max())
        size += float((P.sum() * value.norm()) + (slope * moved).sum()) + _UNDERFLOW * float(moved.sum()) / _ROUNDING
    return J.reshape(n * layer.out_width, n * d), size


def fuzz_saturated(name: str, seeds: range, inputs: float = math.inf) -> KindTally:
    """Intervals, bounds at a point and over the ball on the cases of these numbers, until one is wrong. name: not read."""
    tally = KindTally()
    for seed in seeds:
        case = draw(seed)
        tally.layers += 1
        for x in case.x:
            _compare(case, x, tally)
        if tally.inputs >= inputs or tally.wrong:
            break
    return tally


def _compare(case: Saturated, x: Tensor, tally: KindTally) -> None:
    J, size = derivative(case.layer, x)
    L, off = float(torch.linalg.matrix_norm(J, 2)), _ROUNDING * size
    closed = case.layer.linearize(x[None])[1].dense()[0]
    if not (gap := float((closed - J).abs().max())) <= off:
        tally.wrong.append(f"closed form off by {gap:.1e} of {L:.1e}: {case.name}")
    try:
        found = hs.lipschitz(case.layer, x)
    except HowSmoothError:
        tally.refused += 1
        return
    tally.inputs += 1
    if not found.lower - off <= L <= found.upper + off:
        tally.wrong.append(f"{L} outside [{found.lower}, {found.upper}]: {case.name}")
    radius = float(x.norm(dim=-1).max()) * (1 + 1e-14)
    for b in [*point_of_kind(case.layer, x), *upper_rows(constants(case.layer), len(x), radius)]:
        if b.log_value is None:
            continue
        assert b.value is not None
        tally.upper += 1
        tally.infinite += math.isinf(b.value)
        if math.isnan(b.log_value) or not b.value >= L * (1 - 1e-8) - 1e-3 * off:
            tally.wrong.append(f"{b.id} {b.value} below {L}: {case.name}")
        elif off < 1e-3 * L:
            tally.tightest[b.id] = max(tally.tightest.get(b.id, 0.0), L / b.value)
