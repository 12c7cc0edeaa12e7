"""How far the parts of a head's Jacobian can move when every token moves a little: numbers in place of vectors.

A quantity `Z(Y)` that depends on the tokens is known by three numbers: its size at `X`, how far it can be from `Z(X)`, and how
far it can be from its first-order expansion at `X`. Sums and products of such numbers need nothing else, and so the parts of
the Jacobian (docs/explanation/theory.md §1) come from queries, keys and values. Proofs: docs/explanation/around.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.maps import Attention, AttentionJacobian
from howsmooth.spectral import spectral_norm
from howsmooth.theory.around.pieces import BEND, TWIST, NormAround
from howsmooth.theory.at_point.heads import Geometry
from howsmooth.theory.upper import FARTHEST, Upper, exp_rest, product_norm, softmax_range

_CAP_BEND, _CAP_TWIST = 4 / (3 * math.sqrt(3)), 2.0  # of those of a soft-cap, in units of the cap (Lemma 6.4)
UNITS = 1e-13  # error of a product of tokens and weights, as a share of the product of their lengths, at widths up to 4096


class Jet(NamedTuple):
    """`size ≥ |Z(X)|`, `change ≥ |Z(Y) − Z(X)|`, `rest ≥ |Z(Y) − Z(X) − DZ(X)[Y − X]|`, for all `Y` of a neighbourhood."""

    size: Upper
    change: Upper
    rest: Upper

    def __mul__(self, other: "Jet") -> "Jet":  # pyright: ignore[reportIncompatibleMethodOverride]  a product, not a repeated tuple
        both = self.change * other.change
        return Jet(
            self.size * other.size,
            self.change * other.size + self.size * other.change + both,
            self.rest * other.size + self.size * other.rest + both,
        )

    def __add__(self, other: "Jet") -> "Jet":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Jet(*(a + b for a, b in zip(self, other, strict=True)))

    def sum(self, axis: int) -> "Jet":
        return Jet(*(t.sum(axis) for t in self))

    def map(self, f: Callable[[Tensor], Tensor]) -> "Jet":
        """The jet after a change of shape."""
        return Jet(*(t.map(f) for t in self))


class Move(NamedTuple):
    """Queries or keys of every head when their token moves by at most `r_i`.

    slope: `‖Dq_i(X)‖`.  bend, twist: bounds on the second and third derivative over the neighbourhood.
    """

    slope: Upper  # (heads, n), and the others
    bend: Upper
    twist: Upper

    def step(self, r: Tensor) -> Upper:
        """`|q_i(Y) − q_i(X)|`."""
        return self.slope * r + self.curve(r)

    def curve(self, r: Tensor) -> Upper:
        """`|q_i(Y) − q_i(X) − Dq_i h_i|`."""
        return self.bend * r * r * 0.5

    def derivative(self, r: Tensor) -> Jet:
        """`Dq_i`."""
        return Jet(self.slope, self.bend * r, self.twist * r * r * 0.5)


class Errors(NamedTuple):
    """What rounding may have done to a value, a key and a query, through `R_o`, `R_q` and `R_k`, (heads,) each."""

    values: Upper
    keys: Upper
    queries: Upper


@dataclass(frozen=True)
class Centre:
    """What is known of a layer at `X`, float64, one row per head.

    weights: `P`, zero for queries that are not part of the output.  visible: where a key is visible.
    values: `|R_o (v_j − o_i)|`.  keys: `|k_j − κ_i|`, through `R_q` where queries are affine.  queries: `|q_i|`, through `R_k`.
    cross: `‖τ W_qᵀ W_k‖` where both are affine and not turned, else nothing.  cap: slope of the soft-cap.
    blur: what rounding may have done to a logit, or to the weight made of it.  errors: to one value, key and query.
    """

    layer: Attention
    operator: AttentionJacobian
    geometry: Geometry
    weights: Float[Tensor, "heads n n"]
    visible: Bool[Tensor, "heads n n"]
    values: Upper
    keys: Upper
    queries: Upper
    cross: Upper | None
    cap: Upper | None
    blur: Upper
    errors: Errors

    @property
    def nu(self) -> Upper:
        """`‖W_o W_v‖` of every head, (heads, 1, 1)."""
        return Upper(self.geometry.nu)[:, None, None].raised(64 * self.layer.width)

    @property
    def affine(self) -> bool:
        """Whether queries and keys are affine in their tokens, turned or not."""
        return self.layer.q_norm is None and self.layer.k_norm is None and self.cap is None

    @classmethod
    @torch.no_grad()
    def of(cls, layer: Attention, x: Float[Tensor, "n d"]) -> "Centre":
        operator = layer.linearize(x[None])[1].tiled()
        layer = operator.layer
        kernel, geometry, scale = operator.kernel.tiled(), Geometry.of(layer), abs(layer.scale)
        heads, n = layer.heads, len(x)
        weights, mask = kernel.q.new_zeros(heads, n, n), kernel.scores.mask
        for b in kernel.blocks():
            weights[b.heads, b.rows, b.cols] = b.weights * kernel.inverse[b.heads, b.rows]
        visible = mask.visible(slice(0, n), slice(0, n), x.device).expand(heads, n, n)
        visible = visible if mask.keys is None else visible & mask.keys[0]
        visible = visible if mask.bias is None else visible & (mask.bias[0] != -torch.inf)
        visible = visible if layer.attention_mask is None else visible & layer.attention_mask[0][:, None]
        weights = torch.where(visible, weights.clamp_min(1e-300), 0.0)
        w = layer.by_head()
        longest, exactly = x.norm(dim=-1), "donot_use_mm_for_euclid_dist"  # differences first, so that nothing cancels
        longest_v, longest_k = (t.norm(dim=-1).amax(-1) for t in (kernel.v, kernel.k))
        r_o = geometry.r_o * geometry.out_size
        values, out = kernel.v @ r_o.mT, kernel.o @ r_o.mT
        of_values = UNITS * (spectral_norm(r_o) * (spectral_norm(w.v) * longest.max() + longest_v))[:, None, None]
        units = 4 * (layer.width + kernel.k.shape[-1])
        apart = Upper(torch.cdist(out, values, compute_mode=exactly) + of_values).raised(units)
        plain = layer.q_norm is None and layer.k_norm is None and layer.rotary is None
        k, q = (kernel.k @ geometry.r_q.mT, kernel.q @ geometry.r_k.mT) if plain else (kernel.k, kernel.q)
        middle = weights @ k if layer.softcap is None else torch.zeros_like(k)
        size = spectral_norm(geometry.r_q) if plain else torch.ones_like(k[:, 0, 0])
        keys = Upper(torch.cdist(middle, k, compute_mode=exactly) + UNITS * (longest_k * size)[:, None, None]).raised(units)
        cross = None
        if plain:
            cross = Upper(product_norm(geometry.r_k, geometry.r_q.mT, layer.scale))[:, None, None].raised(16 * units)
        lengths_q, lengths_k = (
            t.norm(dim=-1) + spectral_norm(m)[:, None] * longest for t, m in ((kernel.q, w.q), (kernel.k, w.k))
        )
        of_queries = UNITS * lengths_q * (spectral_norm(geometry.r_k)[:, None] if plain else 1.0)
        queries = Upper(q.norm(dim=-1) + of_queries).raised(units)
        weights_alone = 1e-15 * (n + 8)  # what exponentials, their sum and the division by it do to a weight, relatively
        blur = weights_alone + UNITS * scale * lengths_q[..., None] * lengths_k[:, None]
        if layer.bias is not None:
            blur = blur + UNITS * torch.where(layer.bias.isfinite(), layer.bias, 0.0).abs()[0].double()
        cap = None
        if layer.softcap is not None:
            cap = 1 / torch.cosh((layer.scale * (kernel.q @ kernel.k.mT) / layer.softcap).clamp(-300, 300)).square()
            cap = Upper(cap + 2 * blur / layer.softcap).raised(64)
        errors = Errors(*map(Upper, (of_values[:, 0, 0], UNITS * lengths_k.amax(-1) * size, of_queries.amax(-1))))
        blur = Upper(blur.expand(heads, n, n)).raised(units)
        return cls(layer, operator, geometry, weights, visible, apart, keys, queries, cross, cap, blur, errors)


def visible(centre: Centre, t: Upper) -> Upper:
    """Numbers of visible keys, zero elsewhere."""
    return t.map(lambda m: torch.where(centre.visible, m, 0.0))


def moves(centre: Centre, r: Float[Tensor, " n"]) -> tuple[Move, Move]:
    """Queries and keys."""
    layer, operator, w = centre.layer, centre.operator, centre.layer.by_head()
    gain, found = torch.ones_like(r), []
    if layer.rotary is not None:
        cos, sin = (t.double().reshape(-1, *t.shape[-2:])[0, : len(r)] for t in (layer.rotary.cos, layer.rotary.sin))
        gain = (cos.square() + sin.square()).amax(-1).sqrt().clamp_min(1.0) * (1 + 1e-15)
    for slope, own, whole in ((operator.q_slope, w.q, layer.w_q), (operator.k_slope, w.k, layer.w_k)):
        heads, units = len(own), 64 * max(own.shape[-2:])
        if slope is None:
            none = Upper(r.new_zeros(heads, len(r)))
            found.append(Move(Upper(spectral_norm(own))[:, None].raised(units) * gain, none, none))
            continue
        norm, m = slope.norm, slope.norm.width
        scale = slope.scale[0, ..., 0].double()  # (norm heads, n), or (n,) for a norm over all of them
        scale = scale * (1 - (4 * m + 64) * torch.finfo(slope.scale.dtype).eps)
        if scale.ndim == 1:
            every = torch.eye(layer.width).to(own) if whole is None else whole.double()
            size, scale, units = spectral_norm(norm.center(every.mT).mT)[None], scale[None], 64 * max(every.shape)
        else:
            size, scale = spectral_norm(norm.center(own.mT).mT), scale.repeat_interleave(heads // len(scale), 0)
        size, alpha = Upper(size)[:, None].raised(units), float(norm.weight.abs().max())
        low = NormAround(scale, size * r, m, norm.eps).floor
        steep = size / low
        bend, twist = steep.square() * (BEND * alpha / math.sqrt(m)), steep.square() * steep * (TWIST * alpha / m)
        bounds = (t.raised(8) * gain for t in (size / scale * alpha, bend, twist))
        found.append(Move(*(Upper(t.value.expand(heads, len(r))) for t in bounds)))
    return found[0], found[1]


class Parts(NamedTuple):
    """The three parts of every head's Jacobian, in norms: of `P_ij` beside `W_v`, of the key's block, of the query's.

    output: `R_o o_i`.  value: `R_o (v_j − o_i)`.  slopes: derivatives of the logits in the key's token and in the query's,
    before a soft-cap, and cap: its own.  towards: how far the mean of the tokens that a query sees can move.
    """

    weights: Jet
    key: Jet
    query: Jet
    output: Jet
    value: Jet
    slopes: tuple[Jet, Jet]
    cap: Jet | None
    towards: Upper  # (heads, n)


def parts(centre: Centre, r: Float[Tensor, " n"]) -> Parts:
    """Jets of all parts over the neighbourhood of radii `r` (Theorem 6.5)."""
    query, key = moves(centre, r)
    (by_key, by_query), logit, cap = Logits.of(centre, query, key, r)
    weights = _softmax(centre, logit)
    nu, far = centre.nu, float(r.max())
    towards = ((weights.size + weights.change) * r).sum(-1, keepdim=True).min(far)
    output = Jet(
        towards * 0.0,
        nu * towards + (weights.change * centre.values).sum(-1, keepdim=True),
        nu * (weights.change * r).sum(-1, keepdim=True) + (weights.rest * centre.values).sum(-1, keepdim=True),
    )
    value = Jet(centre.values, nu * r + output.change, output.rest.map(lambda t: t.expand_as(centre.visible)))
    each = weights * value if cap is None else weights * value * cap
    of_key, of_query = each * by_key, (each * by_query).sum(-1)
    output = output.map(lambda t: t[..., 0])
    return Parts(weights, of_key, of_query, output, value, (by_key, by_query), cap, towards[..., 0])


class Logits(NamedTuple):
    """Logits `τ q_i·(k_j − κ_i)`, (heads, n, n), up to what a row has in common.

    slopes: derivatives in the key's token and in the query's, before a soft-cap.  move: how far they move, whose `size` is the
    linear part.  cap: the slope of the soft-cap.
    """

    slopes: tuple[Jet, Jet]
    move: Jet
    cap: Jet | None

    @classmethod
    def of(cls, centre: Centre, query: Move, key: Move, r: Tensor) -> "Logits":
        tau, zero = abs(centre.layer.scale), torch.zeros_like(centre.weights)
        q, k = centre.queries[..., None] * tau, centre.keys * tau
        if centre.cross is not None:
            a, none = centre.cross, Upper(zero)
            slopes = Jet(q + zero, a * r[:, None] + zero, none), Jet(k, a * r + zero, none)
            rest = a * r[:, None] * r
        else:
            dq, dk = query.derivative(r), key.derivative(r)
            along_q = Jet(q, query.step(r)[..., None] * tau, query.curve(r)[..., None] * tau)
            along_k = Jet(k, key.step(r)[:, None] * tau, key.curve(r)[:, None] * tau)
            slopes = along_q * dk.map(lambda t: t[:, None]), along_k * dq.map(lambda t: t[..., None])
            rest = query.curve(r)[..., None] * centre.keys + centre.queries[..., None] * key.curve(r)[:, None]
            rest = (rest + query.step(r)[..., None] * key.step(r)[:, None]) * tau
        linear, rest = slopes[1].size * r[:, None] + slopes[0].size * r, rest + centre.blur
        change, cap = linear + rest, centre.layer.softcap
        if centre.cap is None or cap is None:
            return cls(slopes, Jet(linear, change, rest), None)
        capped = centre.cap * linear
        beyond = (centre.cap * rest + change.square() * (0.5 * _CAP_BEND / cap) + centre.blur).raised(8)
        move = Jet(capped, change.min(capped + beyond).min(centre.blur + 2 * cap), beyond)
        bend, steeper = _CAP_BEND / cap, (change * (_CAP_BEND / cap)).min(1.0)
        rest = rest * bend + change.square() * (0.5 * _CAP_TWIST / cap**2)
        return cls(slopes, move, Jet(centre.cap, steeper.raised(4), rest.min(steeper + linear * bend).raised(8)))


def _softmax(centre: Centre, logit: Jet) -> Jet:
    """`P`: the exact range over a box of logits, and the rest of its expansion (Lemma 6.2)."""
    p = centre.weights

    def mean(t: Upper) -> Upper:
        return (t * p).sum(-1, keepdim=True)

    e = visible(centre, logit.change)
    far = ~(e.amax(-1, keepdim=True).value < FARTHEST)
    change = softmax_range(p, e)[2]
    e = e.map(lambda t: torch.where(far, 0.0, t))
    linear, rest = visible(centre, logit.size), visible(centre, logit.rest)
    shift, grown = mean(exp_rest(e + mean(e))), mean(Upper(e.value.exp()).raised(4)).max(1.0)
    furthest = e + Upper(grown.value.log()).raised(8) + 1e-15
    quadratic = (exp_rest(furthest) + rest + mean(rest) + shift) * p
    quadratic = quadratic.min(change + (linear + mean(linear)) * p).map(lambda t: torch.where(far, torch.inf, t))
    return Jet(Upper(p), visible(centre, change), visible(centre, quadratic))
