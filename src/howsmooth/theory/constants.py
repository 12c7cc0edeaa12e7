"""What a layer contributes to a bound over a ball: norms of its weights, head by head, rounded up."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import NamedTuple, TypeVar, final
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.spectral import spectral_norm
from howsmooth.theory.scaled import LARGEST_GRAM, Scaled, gram_norm, gram_root, scaled, scaled_pairs, triangle
from howsmooth.theory.upper import TINY, largest_entry, no_less, product_blur, product_norm, rounded_up, slack

_Answer = TypeVar("_Answer")


class Core(NamedTuple):
    """`A_h` and `c_h` on a space of at most 2·(head width) dimensions outside which they vanish, and a basis of that space."""

    matrix: Float[Tensor, "heads m m"]
    shift: Float[Tensor, "heads m"]
    basis: Float[Tensor, "heads d m"]


@final
@dataclass(frozen=True, eq=False)
class Constants:
    """The norms of a layer, head by head, in float64, each rounded up (docs/explanation/bounds.md §3.1).

    a: `‖A_h‖₂` with `A_h = τ W_kᵀ W_q`, so that logits are `⟨A x_i + c, x_j⟩` up to a constant in j.
    query_shift: `|c_h|`, `c_h = τ W_kᵀ b_q`.  key_shift: `|τ W_qᵀ b_k|`, which matters under a soft-cap only.
    v: `‖V_h‖₂`, `V_h = W_o^h W_v^h`.  w_v, w_o: `‖W_v^h‖₂`, `‖W_o^h‖₂`.
    cross: `‖V_hᵀ V_k‖₂/(‖V_h‖‖V_k‖)`, 0 for heads without values.  stacked: `‖[V_1 … V_H]‖₂`, and the same with every `V_h`
    divided by its norm; infinite when too large to compute.  blur: the errors of the products `A_h` and `V_h`, which matter
    where these cancel.  bias_range: the most a logit bias varies over the keys of a query.
    pairs: where norms or phases act on queries and keys, queries times `1/f` and keys times `f` for several `f` (§3.16); `a`
    and the shifts then speak of the weights alone.
    """

    attn: Attention
    pairs: tuple[tuple[Scaled, Scaled], ...]
    a: tuple[float, ...]
    query_shift: tuple[float, ...]
    key_shift: tuple[float, ...]
    v: tuple[float, ...]
    w_v: tuple[float, ...]
    w_o: tuple[float, ...]
    cross: Float[Tensor, "heads heads"]
    stacked: tuple[float, float]
    blur: tuple[tuple[float, float], ...]
    bias_range: float

    @property
    def heads(self) -> int:
        return len(self.a)

    def reach(self, h: int, radius: float) -> float:
        """G: the largest `|A x + c|`, how fast a logit moves with its key."""
        if not self.pairs:
            return self.a[h] * radius + self.query_shift[h]
        return abs(self.attn.scale) * min(q.length(h, radius) * k.slope(h, radius) for q, k in self.pairs)

    def key_reach(self, h: int, radius: float) -> float:
        """K: how fast logits of a row move with their query, up to what softmax ignores."""
        attn, traits = self.attn, self.attn.kind.traits
        # A key's bias adds the same to every logit of a row, which softmax ignores, unless it is turned, normalised or capped,
        # or a sink stays where it is. Weights that are not divided by their sums ignore nothing.
        ignored = attn.rotary is None and attn.k_norm is None and attn.softcap is None and traits.sink is None
        shifted = not (ignored and traits.divided)
        if not self.pairs:
            return self.a[h] * radius + (self.key_shift[h] if shifted else 0.0)
        return abs(attn.scale) * min(q.slope(h, radius) * k.length(h, radius, shifted=shifted) for q, k in self.pairs)

    def logit_size(self, h: int, radius: float) -> float:
        """The largest `|q·k|` times the scale."""
        return abs(self.attn.scale) * min(q.length(h, radius) * k.length(h, radius) for q, k in self.pairs or (self.unit,))

    def log_spread(self, h: int, radius: float) -> float:
        """log E: how far apart the logits of one row can be."""
        gap, cap = radius * self.reach(h, radius), self.attn.softcap
        if self.pairs:
            size = self.logit_size(h, radius)
            gap = size if self.attn.rotary is not None else min(size, gap)
        return (2 * gap if cap is None else 2 * cap * math.tanh(gap / cap)) + self.bias_range

    def unbounded(self, radius: float) -> str | None:
        """Why no slope is bounded in the ball, if so."""
        steep = self.pairs and math.inf in [r(h, radius) for r in (self.reach, self.key_reach) for h in range(self.heads)]
        return "a norm on queries or keys with eps = 0 has no bounded slope where they vanish" if steep else None

    def visible(self, n: int | None) -> float:
        """How many keys a query may attend to at most, and how many queries a key; `n=None` for any number of tokens."""
        tokens, window = math.inf if n is None else n, self.attn.window
        return tokens if window is None else min(tokens, window if self.attn.causal else 2 * window - 1)

    @property
    def sink(self) -> Tensor | None:
        """The learned logit of every head that gives no value."""
        return self.attn.kind.traits.sink

    @cached_property
    def unit(self) -> tuple[Scaled, Scaled]:
        """Queries and keys with no factor moved between them."""
        if self.pairs:
            return self.pairs[0]
        w = self.attn.by_head()
        return scaled(triangle(w.q), w.b_q), scaled(triangle(w.k), w.b_k)

    @cached_property
    def value(self) -> Scaled:
        """Values `W_v x + b_v` before the output projection."""
        return scaled(triangle(self.attn.by_head().v), self._value_bias)

    @cached_property
    def out_norm(self) -> float:
        """`‖W_o‖₂` of all heads together."""
        w_o = self.attn.w_o
        return 1.0 if w_o is None else rounded_up(spectral_norm(w_o.double()), max(w_o.shape))[0]

    @property
    def _value_bias(self) -> Float[Tensor, "heads d_v"]:
        attn, w = self.attn, self.attn.by_head().v
        if attn.b_v is None:
            return w.new_zeros(w.shape[:2])
        return attn.b_v.double().unflatten(0, (attn.kv_heads, -1)).repeat_interleave(self.heads // attn.kv_heads, 0)

    @cached_property
    def value_shift(self) -> tuple[float, ...]:
        """`|W_o^h b_v^h|`, which matters where rows of weights do not sum to one."""
        if self.attn.b_v is None:
            return (0.0,) * self.heads
        return rounded_up(product_norm(self.attn.by_head().o, self._value_bias[..., None]), self.attn.width)

    @cached_property
    def bias_total(self) -> float:
        """The most that a logit bias varies over all queries and keys; infinite where it hides some."""
        if self.attn.bias is None:
            return 0.0
        bias = self.attn.bias.double()
        return float(bias.max() - bias.min())

    @cached_property
    def core(self) -> Core:
        w = self.attn.by_head()
        heads, head, d = w.q.shape
        if 2 * head < d:
            basis = torch.linalg.qr(torch.cat([w.k.mT, w.q.mT], -1))[0]  # (heads, d, 2·head)
        else:
            basis = torch.eye(d, dtype=torch.float64, device=w.q.device).expand(heads, d, d)
        kb = self.attn.scale * (w.k @ basis)
        return Core(kb.mT @ (w.q @ basis), (kb.mT @ w.b_q[..., None])[..., 0], basis)

    @cached_property
    def value_maps(self) -> Float[Tensor, "heads d_out d"]:
        """`V_h`, formed."""
        w = self.attn.by_head()
        return w.o @ w.v


@torch.no_grad()
def constants(attn: Attention) -> Constants:
    """The norms of a layer.

    >>> constants(Attention.from_matrices(3 * torch.eye(2), torch.eye(2))).a[0]  # doctest: +ELLIPSIS
    3.00000000000...
    """
    w, scale, width = attn.by_head(), attn.scale, attn.width
    # ‖τ W_kᵀ W_q‖ = |τ| ‖R_k R_qᵀ‖ with W_kᵀ = Q_k R_k: nothing d × d is formed unless a head is that wide
    a = product_norm(triangle(w.k).mT, triangle(w.q), scale)
    unit = largest_entry(w.o) * largest_entry(w.v)
    left, right = w.o / largest_entry(w.o), triangle(w.v) / largest_entry(w.v)
    outputs, blur = left @ right, product_blur(left, right)  # (heads, d_out, r), (heads,)
    v_norm = spectral_norm(outputs) + blur
    by = torch.where(v_norm > 0, v_norm, 1.0)
    even, share = outputs / by[:, None, None], blur / by
    flat, cross = even.transpose(0, 1).flatten(1), torch.diag((v_norm > 0).double())
    gram = (flat.mT @ flat).unflatten(1, even.shape[::2]).unflatten(0, even.shape[::2])  # V_hᵀ V_k of all pairs of heads
    if attn.heads > 1:
        i, j = torch.triu_indices(attn.heads, attn.heads, 1)
        cross[i, j] = cross[j, i] = spectral_norm(gram[i, :, j]) + share[i] + share[j]
    top = largest_entry(outputs)
    logit_blur = product_blur(w.k * abs(scale), w.q)
    found = Constants(
        attn,
        scaled_pairs(attn, w),
        a=rounded_up(a, width),
        query_shift=rounded_up(product_norm(w.k.mT, w.b_q[..., None], scale), width),
        key_shift=rounded_up(product_norm(w.q.mT, w.b_k[..., None], scale), width),
        v=rounded_up(no_less(v_norm, v_norm * unit), width),
        w_v=rounded_up(spectral_norm(w.v), width),
        w_o=rounded_up(spectral_norm(w.o), width),
        cross=cross.cpu() * slack(width),
        stacked=(
            max((_stacked(outputs / top, gram, by / top) * top + float(blur.norm())) * unit, TINY),
            _stacked(even, gram, torch.ones_like(by)) + float(share.norm()),
        ),
        blur=tuple(zip(logit_blur.tolist(), (blur * unit).tolist(), strict=True)),
        bias_range=_bias_range(attn),
    )
    numbers = [*found.a, *found.query_shift, *found.key_shift, *found.v, *found.w_v, *found.w_o]
    if not (all(math.isfinite(x) for x in numbers) and bool(found.core.matrix.isfinite().all())):
        raise BadInputError(
            f"expected weights whose products stay in the range of float64, got ‖A‖ = {max(found.a):.3g} and "
            f"‖V‖ = {max(found.v):.3g}; rescale the weights"
        )
    return found


def _stacked(outputs: Float[Tensor, "heads d_out r"], gram: Tensor, sizes: Float[Tensor, " heads"]) -> float:
    """The norm of heads side by side. gram: `V_hᵀ V_k` of heads divided by their sizes, (heads, r, heads, r)."""
    heads, d_out, r = outputs.shape
    if d_out < heads * r:
        return gram_norm(outputs.transpose(0, 1).flatten(1))
    if heads * r > LARGEST_GRAM:
        return math.inf
    return gram_root((gram * sizes[:, None, None, None] * sizes[:, None]).flatten(2).flatten(0, 1), d_out)


def _bias_range(attn: Attention) -> float:
    if attn.bias is None:
        return 0.0
    bias = attn.bias.double()
    spread = bias.amax(-1) - bias.amin(-1)  # −inf hides a key: an infinite range, NaN where it hides all of them
    return float(torch.where(spread.isnan(), torch.inf, spread).max())


def once_a_layer(f: Callable[[Constants], _Answer]) -> Callable[[Constants], _Answer]:
    """A function of a layer's constants that keeps its answers as long as the constants are there."""
    answers: WeakKeyDictionary[Constants, _Answer] = WeakKeyDictionary()

    @wraps(f)
    def kept(layer: Constants) -> _Answer:
        if layer not in answers:
            answers[layer] = f(layer)
        return answers[layer]

    return kept
