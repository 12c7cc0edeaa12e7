"""Queries and keys that are normalised and turned by their positions: how long they get in a ball and how fast they move.

A query is `q_i = R_i N(W x_i + b)`, `N` a norm or nothing, `R_i` rotary phases or nothing, a key likewise. Logits and their
slopes are products of a length on one side and a length or a slope on the other. Factors `f`, equal on the two entries of a
plane, commute with phases and may be moved from one side to the other, `q·k = (q/f)·(f k)`: each choice gives a bound
(docs/bounds.md §3.16).
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.maps import Attention, LayerNorm, RMSNorm
from howsmooth.theory.radius import norm_radius
from howsmooth.theory.weights import norm as matrix_norm
from howsmooth.theory.weights import slack, split, up

_STEPS = 12  # of the search for factors; every factor is a bound
_EVEN = 1e-4  # rows smaller than this share of the largest one count as that share


@final
@dataclass(frozen=True)
class Side:
    """Queries, or keys, of every head, times a factor `f`: `f ∘ R_i N(W x_i + b)`.

    weight: `‖f W‖`, or `‖C W‖` before a norm (`C` its centring).  shift: `|f b|` or `|C b|`.  alpha, beta, radius: `max |f α|`,
    `|f β|` and the longest vector that leaves the norm times `f`; nothing without one.  gain: of the phases.
    """

    weight: tuple[float, ...]
    shift: tuple[float, ...]
    gain: float
    alpha: tuple[float, ...] | None = None
    beta: tuple[float, ...] = ()
    radius: tuple[float, ...] = ()
    eps: float = 0.0
    width: int = 1

    def length(self, h: int, radius: float, *, shifted: bool = True) -> float:
        """The largest `|f q|` in the ball of tokens, head `h`. shifted: with the bias."""
        reach = self.weight[h] * radius + (self.shift[h] if shifted else 0.0)
        if self.alpha is None:
            return self.gain * reach
        least = self._least_spread(h, radius)
        near = self.alpha[h] * reach / least + self.beta[h] if least > 0 else math.inf
        return self.gain * min(self.radius[h], near)

    def slope(self, h: int, radius: float) -> float:
        """The largest norm of its derivative in the token."""
        if self.alpha is None:
            return self.gain * self.weight[h]
        least = self._least_spread(h, radius)
        return self.gain * self.alpha[h] * self.weight[h] / least if least > 0 else math.inf

    def _least_spread(self, h: int, radius: float) -> float:
        """What a norm divides by, at least: `√(|C(Wx + b)|²/d + eps)`."""
        away = max(0.0, self.shift[h] * (1 - 1e-9) - self.weight[h] * radius)
        return math.sqrt(away**2 / self.width + self.eps) * (1 - 1e-12)


@final
@dataclass(frozen=True)
class Turn:
    """What bounds over a ball need of a layer whose queries and keys are normalised or turned (docs/bounds.md §3.16).

    pairs: queries times `1/f` and keys times `f`, for several `f`.  phases: rotary phases among them.
    """

    scale: float
    phases: bool
    pairs: tuple[tuple[Side, Side], ...]
    centred_keys: bool

    def reach(self, h: int, radius: float) -> float:
        """G: how fast a logit moves with its key, at most."""
        return self.scale * min(q.length(h, radius) * k.slope(h, radius) for q, k in self.pairs)

    def key_reach(self, h: int, radius: float) -> float:
        """K: how fast logits of a row move with their query, up to what softmax ignores."""
        return self.scale * min(q.slope(h, radius) * k.length(h, radius, shifted=not self.centred_keys) for q, k in self.pairs)

    def half_range(self, h: int, radius: float) -> float:
        """Half of how far apart the logits of one row can be, before a soft-cap."""
        size = self.scale * min(q.length(h, radius) * k.length(h, radius) for q, k in self.pairs)
        return size if self.phases else min(size, radius * self.reach(h, radius))

    def unbounded(self, h: int, radius: float) -> bool:
        """Whether a slope has no bound in the ball."""
        return math.isinf(self.reach(h, radius)) or math.isinf(self.key_reach(h, radius))


@torch.no_grad()
def turn_of(layer: Attention) -> Turn | None:
    """The sizes of a layer's queries and keys, nothing where they are affine in the tokens.

    >>> from howsmooth.maps import Rotary
    >>> eye = torch.eye(2, dtype=torch.float64)
    >>> turned = turn_of(Attention(3 * eye, eye, eye, scale=1.0, rotary=Rotary.from_base(2, 5)))
    >>> round(turned.reach(0, radius=2.0), 9)
    6.0
    """
    if layer.q_norm is None and layer.k_norm is None and layer.rotary is None:
        return None
    q, k, _, b_q, b_k = split(layer)
    gain = 1.0 if layer.rotary is None else layer.rotary.gain
    triangle_q, triangle_k = _triangle(q), _triangle(k)
    pairs = tuple(
        (
            _side(triangle_q, b_q, layer.q_norm, gain, 1 / f),
            _side(triangle_k, b_k, layer.k_norm, gain, f),
        )
        for f in _factors(layer, triangle_q, triangle_k)
    )
    # A key's bias adds the same to every logit of a row, which softmax ignores, unless it is turned, normalised or capped.
    centred = layer.rotary is None and layer.k_norm is None and layer.softcap is None
    return Turn(abs(layer.scale), layer.rotary is not None, pairs, centred)


def plane_factors(layer: Attention, sizes: Float[Tensor, "*heads head"]) -> Float[Tensor, "*heads head"]:
    """The largest of `sizes` on each plane of a head, entry by entry, none below a share of the largest one."""
    plane = torch.arange(sizes.shape[-1]) if layer.rotary is None else layer.rotary.planes(sizes.shape[-1])
    plane = plane.to(sizes.device).expand(sizes.shape)
    top = torch.zeros_like(sizes).scatter_reduce_(-1, plane, sizes, "amax").gather(-1, plane)
    largest = top.amax(-1, keepdim=True)
    return torch.where(largest > 0, top.clamp_min(_EVEN * largest), 1.0)


def _factors(
    layer: Attention, w_q: Float[Tensor, "heads head r"], w_k: Float[Tensor, "heads head r"]
) -> list[Float[Tensor, "heads head"]]:
    """Factors worth trying: none, the weights of either norm, what balances the two sides."""
    ones = torch.ones(w_q.shape[:2], dtype=torch.float64, device=w_q.device)
    r_q, r_k = (
        plane_factors(layer, w.norm(dim=-1) if n is None else n.weight.double().abs().expand(len(w), -1).to(w.device))
        for w, n in ((w_q, layer.q_norm), (w_k, layer.k_norm))
    )
    found = [ones, 1 / r_k, r_q, (r_q / r_k).sqrt()]
    if layer.q_norm is None and layer.k_norm is None:
        found.append(_balanced(layer, w_q, w_k, found))
    return found


def _balanced(layer: Attention, w_q: Tensor, w_k: Tensor, starts: list[Tensor]) -> Float[Tensor, "heads head"]:
    """Factors that make `‖W_q/f‖ ‖f W_k‖` small, by steps along its slope in `log f`."""
    gram_q, gram_k = w_q @ w_q.mT, w_k @ w_k.mT

    def parts(f: Tensor) -> tuple[Tensor, Tensor]:
        """The product's square, and the way down in `log f`, from the top eigenvectors of both Gram matrices."""
        value_q, vector_q = torch.linalg.eigh(gram_q / (f[:, :, None] * f[:, None]))
        value_k, vector_k = torch.linalg.eigh(gram_k * (f[:, :, None] * f[:, None]))
        return value_q[:, -1] * value_k[:, -1], vector_q[..., -1].square() - vector_k[..., -1].square()

    plane = torch.arange(w_q.shape[1]) if layer.rotary is None else layer.rotary.planes(w_q.shape[1])
    plane = plane.to(w_q.device).expand(w_q.shape[:2])
    values = torch.stack([parts(f)[0] for f in starts])
    best, least = torch.stack(starts)[values.argmin(0), torch.arange(values.shape[1])], values.amin(0)
    f, down = best, parts(best)[1]
    for step in range(_STEPS):
        down = torch.zeros_like(f).scatter_add_(-1, plane, down).gather(-1, plane)
        f = f * (down / (1 + step) ** 0.5).exp()
        now, down = parts(f)
        best, least = torch.where((now < least)[:, None], f, best), torch.minimum(now, least)
    return best


def _side(
    w: Float[Tensor, "heads head r"],
    b: Float[Tensor, "heads head"],
    norm: LayerNorm | RMSNorm | None,
    gain: float,
    f: Float[Tensor, "heads head"],
) -> Side:
    size = max(w.shape[1:])
    if norm is None:
        return Side(up(matrix_norm(w * f[..., None]), size), up((b * f).norm(dim=-1), size), gain)
    norm = norm.to(f.device, torch.float64)
    mean = 1 if isinstance(norm, LayerNorm) else 0
    centred, shift = w - mean * w.mean(1, keepdim=True), b - mean * b.mean(1, keepdim=True)
    beta = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
    return Side(
        up(matrix_norm(centred), size),
        up(shift.norm(dim=-1), size),
        gain,
        alpha=up((norm.weight * f).abs().amax(-1), size),
        beta=up((beta * f).norm(dim=-1), size),
        radius=tuple(norm_radius(type(norm)(norm.weight * row, beta * row, norm.eps)) * slack(size) for row in f),
        eps=norm.eps,
        width=norm.width,
    )


def _triangle(w: Float[Tensor, "heads head d"]) -> Float[Tensor, "heads head r"]:
    """`w` up to an isometry of its input."""
    return torch.linalg.qr(w.mT, mode="r")[1].mT
