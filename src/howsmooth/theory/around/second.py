"""Second derivatives of an attention layer at an input, by products: along pairs of directions, and all of them at once.

Numbers such as 6.11 are those of docs/explanation/around.md.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.spectral import DenseSVD, GolubKahan, Operator, norm_upper
from howsmooth.spectral.operator import stream
from howsmooth.theory.around.jets import Centre
from howsmooth.theory.around.pairs import Effort, Pairs
from howsmooth.theory.bound import lengths
from howsmooth.theory.upper import Upper

_STEPS = 6  # for each certificate along a pair: within a factor of two where spectra fall off
_FLAT_STEPS, _FLAT_WIDTH = 20, 0.1  # for the certificate of all second derivatives at once
_NUMBERS, _KEPT = 2**23, 2**24  # numbers of probes that are worked on at once, and that are kept from product to product
_UNIT = torch.finfo(torch.float64).eps


class Probes(NamedTuple):
    """Input directions, and what they make of queries, keys, values and logits where queries and keys are affine.

    logits: `⟨ξ, v_i⟩ + ⟨g, v_j⟩`, less its mean under the weights.
    """

    v: Float[Tensor, "probes n d"]
    q: Float[Tensor, "probes heads n d_h"]
    k: Float[Tensor, "probes heads n d_h"]
    values: Float[Tensor, "probes heads n d_v"]
    logits: Float[Tensor, "probes heads n n"]


@final
class Second:
    """`gradient`: `∂_X ⟨u, J(X) v⟩`, and `along`: `D²f(X)[h, v]`, linear in `h`, `v` and `u`, each the other's transpose."""

    def __init__(self, centre: Centre):
        self.centre, self.layer = centre, centre.layer
        assert centre.operator.tokens is not None
        self.x = centre.operator.tokens.detach()

    def probes(self, v: Float[Tensor, "probes n d"]) -> Probes:
        operator, kernel = self.centre.operator, self.centre.operator.kernel.tiled()
        group = self.layer.heads // self.layer.kv_heads
        q, k, values = (t[:, 0] for t in operator.vectors(v[:, None]))
        k, values = k.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        return Probes(v, q, k, values, self._centred(self.layer.scale * (q @ kernel.k.mT + kernel.q @ k.mT)))

    def _centred(self, t: Tensor) -> Tensor:
        return t - (self.centre.weights * t).sum(-1, keepdim=True)

    def gradient(self, u: Float[Tensor, "n d_out"], at: Probes) -> Float[Tensor, "probes n d"]:
        """`∂_X ⟨u, J(X) v⟩` for every probe `v`, in closed form where queries and keys are affine (6.11)."""
        if not self.centre.affine:
            return torch.stack([self._differentiated(u, v, keep=False) for v in at.v])
        kernel, p, w = self.centre.operator.kernel.tiled(), self.centre.weights, self.layer.by_head()
        tau, c = self.layer.scale, torch.einsum("io,hov->hiv", u, w.o)
        phi = self._centred(c @ kernel.v.mT)
        by_logit = p * self._centred(c @ at.values.mT + phi * at.logits)
        by_phi, by_psi = p * at.logits, p * phi
        g_q = tau * (by_logit @ kernel.k + by_psi @ at.k)
        g_k = tau * (by_logit.mT @ kernel.q + by_psi.mT @ at.q)
        g_v = by_phi.mT @ c
        if self.layer.rotary is not None:
            g_q, g_k = (self.layer.rotary.turn(t, back=True) for t in (g_q, g_k))
        return sum(torch.einsum("phna,had->pnd", g, m) for g, m in ((g_q, w.q), (g_k, w.k), (g_v, w.v)))  # pyright: ignore[reportReturnType]

    def along(self, a: Probes, b: Probes) -> Float[Tensor, "probes n d_out"]:
        """`D²f(X)[h, v]` for every pair of probes, in closed form where queries and keys are affine (6.11)."""
        if not self.centre.affine:
            return torch.stack([self._along(h, v) for h, v in zip(a.v, b.v, strict=True)])
        p, layer = self.centre.weights, self.layer
        both = a.logits * b.logits + layer.scale * (a.q @ b.k.mT + b.q @ a.k.mT)
        out = (p * a.logits) @ b.values + (p * b.logits) @ a.values
        out = layer.concat(out + (p * self._centred(both)) @ self.centre.operator.kernel.tiled().v)
        return out if layer.w_o is None else out @ layer.w_o.mT

    def _along(self, h: Tensor, v: Tensor) -> Tensor:
        """`D²f(X)[h, v]` by automatic differentiation, as the transpose of what is linear in `u`."""
        with torch.inference_mode(False), torch.enable_grad():
            u = h.new_zeros(len(h), self.layer.out_width).requires_grad_()
            back = self._differentiated(u, v, keep=True)
            return torch.autograd.grad(back, u, h, materialize_grads=True)[0] if back.requires_grad else u.detach()

    def _differentiated(self, u: Tensor, v: Tensor, keep: bool) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            x = self.x.clone().requires_grad_()
            (back,) = torch.autograd.grad(self.layer.value(x), x, u[None], create_graph=True, materialize_grads=True)
            if not back.requires_grad:  # a linear layer
                return torch.zeros_like(v)
            return torch.autograd.grad(back, x, v[None], create_graph=keep, materialize_grads=True)[0][0]


@final
class AlongRow(Operator):
    """`h ↦ ∂_X ⟨u, J(X) h⟩`, which is symmetric."""

    def __init__(self, second: Second, u: Float[Tensor, "n d_out"]):
        self.batch, self.in_shape, self.out_shape = 1, second.x.shape[1:], second.x.shape[1:]
        self.dtype, self.device = second.x.dtype, second.x.device
        self._second, self._u = second, u

    def jvp(self, v):
        return self._second.gradient(self._u, self._second.probes(v[:, 0]))[:, None]

    def vjp(self, u):
        return self.jvp(u)


@final
class AlongProbes(Operator):
    """`u ↦ (∂_X ⟨u, J(X) v_s⟩)_s` where some tokens move. Its transpose takes `(h_s)` to `Σ_s D²f[h_s, v_s]`."""

    def __init__(self, second: Second, v: Float[Tensor, "probes n d"], columns: Tensor):
        n, d = second.x.shape[1:]
        self.batch, self.in_shape, self.out_shape = 1, (n, second.layer.out_width), (len(v), len(columns), d)
        self.dtype, self.device = second.x.dtype, second.x.device
        self._second, self._columns = second, columns
        step = max(1, _NUMBERS // (second.layer.heads * n * n + n * d))
        few = len(v) * (second.layer.heads * n * n + 3 * n * d) <= _KEPT
        self._parts: list[Probes | Tensor] = [second.probes(w) if few else w for w in v.split(step)]

    def _probes(self) -> Iterator[Probes]:
        return (self._second.probes(w) if isinstance(w, Tensor) else w for w in self._parts)

    def jvp(self, v):
        found = [torch.cat([self._second.gradient(u, at) for at in self._probes()]) for u in v[:, 0]]
        return torch.stack(found)[:, None, :, self._columns]

    def vjp(self, u):
        found = []
        for h in u[:, 0]:
            moved, total, done = h.new_zeros(len(h), *self._second.x.shape[1:]).index_copy_(1, self._columns, h), [], 0
            for at in self._probes():
                part = self._second.probes(moved[done : done + len(at.v)])
                total, done = [*total, self._second.along(part, at).sum(0)], done + len(at.v)
            found.append(torch.stack(total).sum(0))
        return torch.stack(found)[:, None]


@final
class Transposed(Operator):
    """`Jᵀ` as an operator of its own."""

    def __init__(self, operator: Operator):
        self.batch, self.in_shape, self.out_shape = operator.batch, operator.out_shape, operator.in_shape
        self.dtype, self.device = operator.dtype, operator.device
        self._operator = operator

    def jvp(self, v):
        return self._operator.vjp(v)

    def vjp(self, u):
        return self._operator.jvp(u)


class Curves(NamedTuple):
    """What is known of second derivatives along the pairs.

    core: lengths of `∂_X ⟨u_a, J v_b⟩`, token by token.  rows, columns: norms along `u_a` and `v_b`.
    """

    core: Float[Tensor, "exact exact n"]
    rows: Float[Tensor, " pairs"]
    columns: Float[Tensor, " pairs"]


def curves(second: Second, pairs: Pairs, effort: Effort, delta: float, seed: int) -> Curves:
    """Norms of second derivatives along the pairs. delta: of all the certificates together."""
    exact, count, n = min(effort.exact, len(pairs.core)), len(pairs.core), second.x.shape[1]
    right = second.probes(pairs.right[:exact])
    core = torch.stack([lengths(second.gradient(u, right)) for u in pairs.left[:exact]])
    every = torch.arange(n, device=core.device)
    operators: list[Operator] = [AlongRow(second, u) for u in pairs.left]
    operators += [Transposed(AlongProbes(second, v[None], every)) for v in pairs.right]
    seeds = [*range(seed, seed + 2 * count, 2), *range(seed + 1, seed + 2 * count, 2)]
    norms = [_norm(J, delta / (2 * count), k) for J, k in zip(operators, seeds, strict=True)]
    return Curves(core, core.new_tensor(norms[:count]), core.new_tensor(norms[count:]))


def _norm(operator: Operator, delta: float, seed: int) -> float:
    solver = DenseSVD() if operator.in_size <= _STEPS else GolubKahan(max_steps=_STEPS, delta=delta)
    return float(norm_upper(operator, solver, 0.2, [seed])[0])


def flattened(second: Second, columns: Tensor, probes: int, delta: float, seed: int) -> float:
    """A bound on `‖D²f(X)[h, ·]‖` for all `|h| ≤ 1`, `h` and the derivative's columns at some tokens (Theorem 6.12).

    As many Gaussian directions as `probes` stand for all of them; where there are no more of these, a basis does.
    """
    (n, d), count = second.x.shape[1:], len(columns)
    if count * d <= probes:
        v, share = torch.eye(count * d, dtype=torch.float64), 1.0
    else:
        v = torch.randn(probes, count * d, generator=stream(seed, "second"), dtype=torch.float64) / math.sqrt(probes)
        share = least_share(probes, delta / 2)
    v = v.to(second.x.device).unflatten(-1, (count, d))
    v = v.new_zeros(len(v), n, d).index_copy_(1, columns, v)
    operator = AlongProbes(second, v, columns)
    upper = norm_upper(operator, GolubKahan(max_steps=_FLAT_STEPS, delta=delta / 2), _FLAT_WIDTH, [seed + 1])
    rounding = Upper(v.flatten(1).norm()) * _rounding(second)
    return float((Upper(float(upper[0])) + rounding) / (math.sqrt(share) * (1 - 4 * _UNIT)))


def least_share(probes: int, delta: float) -> float:
    """A `t < 1` with `(t e^{1 − t})^{m/2} ≤ δ`: the mean of `m` squares that is as rare as that (Theorem 6.12).

    >>> 64 / 2 * (math.log(t := least_share(64, 1e-6)) + 1 - t) <= math.log(1e-6)
    True
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        rare = probes / 2 * (math.log(middle) + 1 - middle) <= math.log(delta) - 1e-9
        low, high = (middle, high) if rare else (low, middle)
    return low


def _rounding(second: Second) -> Upper:
    """What rounding may make of `⟨u, D²f[h, v]⟩` for unit vectors: its sums with absolute values, times their error (6.14)."""
    w, kernel = second.layer.by_head(), second.centre.operator.kernel.tiled()
    n, d = second.x.shape[1:]
    tau = abs(second.layer.scale)
    q, k, v, o = (Upper(lengths(t.flatten(1))).raised(n * d) for t in (w.q, w.k, w.v, w.o))
    keys, queries, values = (Upper(lengths(t).amax(-1)).raised(n * d) for t in (kernel.k, kernel.q, kernel.v))
    logit = 2 * tau * (q * keys + queries * k)
    both = 2 * (logit.square() + 2 * tau * (q * k))
    size = (o * (2.0 * logit * v + both * values)).sum()
    terms = 4 * (4 * n + 2 * d + 2 * kernel.k.shape[-1] + 64)
    return size * (math.sqrt(n) * terms * _UNIT)
