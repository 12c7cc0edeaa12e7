"""Multi-head softmax self-attention as a map with a closed-form Jacobian."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.attention.maps import Map, check_finite
from howsmooth.attention.norms import LayerNorm, RMSNorm
from howsmooth.attention.rotary import Rotary
from howsmooth.errors import BadInputError
from howsmooth.kernels import Mask, Scores, SoftmaxAttention, attend, linearize
from howsmooth.measures.measure import Measure
from howsmooth.operators import Operator, inner


@final
@dataclass(frozen=True, eq=False)
class Attention(Map):
    """Softmax self-attention `x ↦ W_o concat_h(P_h v_h) + b_o` with `P_h = softmax(scale · q_h k_hᵀ)`.

    Weights have the shape of `nn.Linear.weight`, (out, in). `w_k=None` takes the tokens themselves as keys, `w_o=None`
    leaves the heads concatenated. `kv_heads` groups query heads that share keys and values; `scale` defaults to
    `1/√(head width)`. `causal` and `window` (`|i − j| < window`) bound what a token sees, `softcap` bounds logits to
    `softcap·tanh(s/softcap)`, `bias` is added after that. `attention_mask`, (batch, n), is true at real tokens: the others
    are not part of the input, neither seen nor measured. `q_norm` and `k_norm` normalise the queries and keys of every head
    (Qwen3, Gemma 3), then `rotary` turns them by their positions (Llama). Derivative: docs/theory.md §1.

    >>> attn = Attention.from_matrices(torch.zeros(2, 2), torch.eye(2))
    >>> attn(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """

    w_q: Float[Tensor, "q_width d"]
    w_k: Float[Tensor, "k_width d"] | None
    w_v: Float[Tensor, "v_width d"]
    w_o: Float[Tensor, "d_out o_width"] | None = None
    heads: int = 1
    kv_heads: int | None = None
    b_q: Float[Tensor, " q_width"] | None = None
    b_k: Float[Tensor, " k_width"] | None = None
    b_v: Float[Tensor, " v_width"] | None = None
    b_o: Float[Tensor, " d_out"] | None = None
    scale: float | None = None
    softcap: float | None = None
    causal: bool = False
    window: int | None = None
    bias: Float[Tensor, "#batch #heads #n m"] | None = None
    attention_mask: Bool[Tensor, "batch n"] | None = None
    q_norm: LayerNorm | RMSNorm | None = None
    k_norm: LayerNorm | RMSNorm | None = None
    rotary: Rotary | None = None

    def __post_init__(self):
        kv_heads = self._kv_heads
        if not all(isinstance(h, int) and h >= 1 for h in (self.heads, kv_heads)) or self.heads % kv_heads:
            raise BadInputError(
                f"expected whole numbers heads ≥ 1 and kv_heads that divide them, got heads={self.heads}, kv_heads={kv_heads}; "
                "take both from the model's configuration"
            )
        for name in ("w_q", "w_k", "w_v", "w_o"):
            self._check_weight(name)
        k_width = self.width if self.w_k is None else self.w_k.shape[0]
        for name, rows, parts in (
            ("w_q", self.w_q.shape[0], self.heads),
            ("w_k", k_width, kv_heads),
            ("w_v", self.w_v.shape[0], kv_heads),
        ):
            if rows % parts:
                raise BadInputError(
                    f"expected heads that divide the rows of {name}, got {parts} heads and {rows} rows; change heads or {name}"
                )
        if self.w_q.shape[0] // self.heads != k_width // kv_heads:
            raise BadInputError(
                f"expected queries and keys of one head width, got {self.w_q.shape[0] // self.heads} and "
                f"{k_width // kv_heads}; check heads and kv_heads"
            )
        o_width = self.w_v.shape[0] // kv_heads * self.heads
        if self.w_o is not None and self.w_o.shape[1] != o_width:
            raise BadInputError(f"expected w_o of shape (out, {o_width}), got {tuple(self.w_o.shape)}; weights are (out, in)")
        sizes = (self.w_q.shape[0], k_width, self.w_v.shape[0], self.out_width)
        for name, size in zip(("b_q", "b_k", "b_v", "b_o"), sizes, strict=True):
            self._check_bias(name, size)
        if not math.isfinite(self._scale):
            raise BadInputError(f"expected a finite scale, got {self.scale}; the usual value is 1/√(head width)")
        self._check_masks()
        self._check_turn()

    def _check_turn(self) -> None:
        """Norms and phases must fit the width of a head."""
        head = self.w_q.shape[0] // self.heads
        for name in ("q_norm", "k_norm"):
            norm = getattr(self, name)
            if norm is not None and not isinstance(norm, LayerNorm | RMSNorm):
                raise BadInputError(f"expected {name} as a LayerNorm or RMSNorm, got {type(norm).__name__}; build one of them")
            if norm is not None and norm.width != head:
                raise BadInputError(
                    f"expected {name} over the head width {head}, got {norm.width}; it normalises every head by itself"
                )
        if self.rotary is not None and not isinstance(self.rotary, Rotary):
            raise BadInputError(f"expected rotary as a Rotary, got {type(self.rotary).__name__}; use Rotary.from_base")
        if self.rotary is not None and self.rotary.width > head:
            raise BadInputError(
                f"expected rotary tables that turn at most the head width {head}, got {self.rotary.width}; "
                "cos and sin have one column per plane, not per entry"
            )

    def _check_masks(self) -> None:
        for name, axes, kinds in (
            ("bias", "(batch, heads, n, m)", (torch.float16, torch.bfloat16, torch.float32, torch.float64)),
            ("attention_mask", "(batch, n)", (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)),
        ):
            t = getattr(self, name)
            if t is not None and not (isinstance(t, Tensor) and t.ndim == axes.count(",") + 1 and t.dtype in kinds):
                got = f"{t.dtype} of shape {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
                kind = "a floating-point" if name == "bias" else "a boolean or integer"
                raise BadInputError(
                    f"expected {name} as {kind} tensor {axes}, got {got}; give it these axes, 1 where it broadcasts"
                )
        if self.attention_mask is not None:
            object.__setattr__(self, "attention_mask", self.attention_mask.bool())
            if not bool(self.attention_mask.any(-1).all()):
                raise BadInputError(
                    "expected a real token in every sequence, got an attention_mask with an empty row; leave that sequence out"
                )
        Scores(self._scale, self.softcap, Mask(self.causal, self.window, None, self.bias))  # refuses what does not fit

    @classmethod
    def from_matrices(
        cls,
        A: Float[Tensor, "*heads d d"],
        V: Float[Tensor, "*heads d_out d"],
        *,
        causal: bool = False,
        window: int | None = None,
    ) -> "Attention":
        """Attention in the paper's notation: `f(X)_i = V Σ_j P_ij x_j`, `P_ij = softmax_j ⟨A x_i, x_j⟩`.

        Stacks of matrices, (heads, d, d), give the sum over heads.
        """
        for name, matrix in (("A", A), ("V", V)):
            if not isinstance(matrix, Tensor):
                raise BadInputError(
                    f"expected {name} as a torch tensor, got {type(matrix).__name__}; use torch.as_tensor({name})"
                )
        if A.ndim not in (2, 3) or A.shape[-1] != A.shape[-2]:
            raise BadInputError(f"expected a square A, (d, d) or (heads, d, d), got {tuple(A.shape)}; A acts on one token")
        if V.ndim != A.ndim or V.shape[-1] != A.shape[-1] or V.shape[:-2] != A.shape[:-2]:
            raise BadInputError(
                f"expected V with one (d_out, d) matrix per A of {tuple(A.shape)}, got {tuple(V.shape)}; match their widths"
            )
        if A.ndim == 2:
            return cls(A, None, V, scale=1.0, causal=causal, window=window)
        heads, d = A.shape[:2]
        eye = torch.eye(d, dtype=A.dtype, device=A.device)
        add = torch.eye(V.shape[1], dtype=V.dtype, device=V.device).repeat(1, heads)
        return cls(A.flatten(0, 1), eye.repeat(heads, 1), V.flatten(0, 1), add, heads, scale=1.0, causal=causal, window=window)

    @property
    def width(self) -> int:
        return self.w_q.shape[1]

    @property
    def out_width(self) -> int:
        return self.w_v.shape[0] // self._kv_heads * self.heads if self.w_o is None else self.w_o.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        kinds = [w.dtype for w in (self.w_q, self.w_k, self.w_v, self.w_o) if w is not None]
        return functools.reduce(torch.promote_types, kinds)

    @property
    def _kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def _scale(self) -> float:
        return (self.w_q.shape[0] // self.heads) ** -0.5 if self.scale is None else float(self.scale)

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> "Attention":
        moved = {}
        for f in fields(self):
            t = getattr(self, f.name)
            if isinstance(t, Tensor):
                there = t.to(device, dtype if t.is_floating_point() else t.dtype)
            elif isinstance(t, LayerNorm | RMSNorm | Rotary):
                there = t.to(dtype, device)
            else:
                continue
            if there is not t:
                moved[f.name] = there
        return replace(self, **moved) if moved else self

    def on(self, measure: Measure) -> "AtomAttention":
        """Attention to atoms: `log a_j` is added to the logits of atom j, masks go by positions (docs/meanfield.md §5.1)."""
        for name, why in (
            ("window", "a window counts tokens, which a measure does not have"),
            ("bias", "a bias belongs to places in a sequence"),
            ("rotary", "rotary phases belong to places in a sequence"),
            ("q_norm", "what splitting a normalised query does is not derived"),
            ("k_norm", "what splitting a normalised key does is not derived"),
            ("attention_mask", "padding has no mass; leave those atoms out"),
        ):
            if getattr(self, name) is not None:
                raise BadInputError(f"expected a layer without {name} for a measure, got one with it; {why}")
        ends = measure.ends() if self.causal else None
        bias = measure.mass.log()[None, None, None]
        return AtomAttention(self, Scores(self._scale, self.softcap, Mask(bias=bias, ends=ends)))

    def value(self, x):
        return self._value(x, self._scores(x))

    def _value(self, x: Float[Tensor, "batch n d"], scores: Scores) -> Float[Tensor, "batch n d_out"]:
        q, k, v = self._project(x, with_bias=True)
        q = q if self.q_norm is None else self.q_norm.value(q)
        k = k if self.k_norm is None else self.k_norm.value(k)
        q, k = self._turn(x, q, k)
        return self._finish(attend(q, k, v, scores))

    def linearize(self, x):
        return self._linearize(x, self._scores(x))

    @torch.no_grad()
    def _linearize(self, x: Float[Tensor, "batch n d"], scores: Scores) -> tuple[Tensor, "_AttentionJacobian"]:
        layer = self.to(x.dtype, x.device)
        q, k, v = layer._project(x, with_bias=True)
        slopes: list[Operator | None] = [None, None]  # of the norms of queries and keys
        if layer.q_norm is not None:
            q, slopes[0] = layer.q_norm.linearize(q)
        if layer.k_norm is not None:
            k, slopes[1] = layer.k_norm.linearize(k)
        q, k = layer._turn(x, q, k)
        kernel = linearize(q, k, v, scores)
        value = layer._finish(kernel.output)
        if not bool(value.isfinite().all()):
            raise BadInputError(f"expected outputs within the range of {x.dtype}, got infinity; use float64 or smaller weights")
        return value, _AttentionJacobian(layer, kernel, x.shape, value.shape[-1], slopes[0], slopes[1])

    def _turn(self, x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.rotary is None:
            return q, k
        self.rotary.check(*x.shape[:2])
        return self.rotary.turn(q), self.rotary.turn(k)

    def _scores(self, x: Float[Tensor, "batch n d"]) -> Scores:
        if self.attention_mask is not None and self.attention_mask.shape != x.shape[:2]:
            raise BadInputError(
                f"expected an attention_mask of shape {tuple(x.shape[:2])}, got {tuple(self.attention_mask.shape)}; "
                "give one row per sequence"
            )
        mask = Mask(self.causal, self.window, self.attention_mask, self.bias)
        return Scores(self._scale, self.softcap, mask)

    def _finish(self, o: Float[Tensor, "batch heads n d_v"]) -> Float[Tensor, "batch n d_out"]:
        t = self._concat(o[None])[0]
        t = t if self.w_o is None else t @ self.w_o.mT
        return t if self.b_o is None else t + self.b_o

    def _project(self, x: Tensor, with_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (…, n, d) → queries, keys, values (…, heads, n, head width)."""
        parts = []
        for weight, bias, heads in (
            (self.w_q, self.b_q, self.heads),
            (self.w_k, self.b_k, self._kv_heads),
            (self.w_v, self.b_v, self._kv_heads),
        ):
            t = x if weight is None else x @ weight.mT
            if with_bias and bias is not None:
                t = t + bias
            parts.append(t.unflatten(-1, (heads, -1)).transpose(-3, -2))
        return parts[0], parts[1], parts[2]

    def _concat(self, o: Float[Tensor, "probes batch heads n d_v"]) -> Float[Tensor, "probes batch n o_width"]:
        """Heads → tokens; tokens that are not real give zero."""
        t = o.transpose(-3, -2).flatten(-2)
        return t if self.attention_mask is None else t * self.attention_mask[..., None]

    def _split(self, t: Float[Tensor, "probes batch n o_width"]) -> Float[Tensor, "probes batch heads n d_v"]:
        """The transpose of `_concat`."""
        t = t if self.attention_mask is None else t * self.attention_mask[..., None]
        return t.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def _unproject(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """The transpose of `_project`."""
        total = None
        for t, weight in ((dq, self.w_q), (dk, self.w_k), (dv, self.w_v)):
            t = t.transpose(-3, -2).flatten(-2)
            part = t if weight is None else t @ weight
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def _check_weight(self, name: str) -> None:
        w = getattr(self, name)
        if w is None:
            return
        if not isinstance(w, Tensor) or not w.is_floating_point() or w.ndim != 2:
            got = f"{w.dtype} of shape {tuple(w.shape)}" if isinstance(w, Tensor) else type(w).__name__
            raise BadInputError(f"expected {name} as a floating-point matrix (out, in), got {got}; pass nn.Linear's weight")
        if name != "w_o" and w.shape[1] != self.width:
            raise BadInputError(
                f"expected {name} to take tokens of width {self.width} like w_q, got {w.shape[1]}; weights are (out, in)"
            )
        check_finite(w, name)

    def _check_bias(self, name: str, size: int) -> None:
        b = getattr(self, name)
        if b is None:
            return
        if not isinstance(b, Tensor) or not b.is_floating_point() or tuple(b.shape) != (size,):
            got = tuple(b.shape) if isinstance(b, Tensor) else type(b).__name__
            raise BadInputError(
                f"expected {name} as a floating-point vector of shape ({size},), got {got}; pass nn.Linear's bias"
            )
        check_finite(b, name)


@final
@dataclass(frozen=True, eq=False)
class AtomAttention(Map):
    """An attention layer on the atoms of a measure: as a layer on tokens, with masses and positions in its scores."""

    layer: Attention
    scores: Scores

    @property
    def width(self) -> int:
        return self.layer.width

    @property
    def out_width(self) -> int:
        return self.layer.out_width

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.dtype

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> "AtomAttention":
        return replace(self, layer=self.layer.to(dtype, device))

    def value(self, x):
        return self.layer._value(x, self.scores)

    def linearize(self, x):
        return self.layer._linearize(x, self.scores)


@final
class _AttentionJacobian(Operator):
    """`D_x f = Wₒ ∘ concat ∘ D(softmax attention) ∘ turn ∘ D(norms) ∘ project`."""

    def __init__(
        self,
        layer: Attention,
        kernel: SoftmaxAttention,
        shape: Sequence[int],
        d_out: int,
        q_slope: Operator | None = None,
        k_slope: Operator | None = None,
    ):
        self._layer, self._kernel, self._q_slope, self._k_slope = layer, kernel, q_slope, k_slope
        self.batch, n, d = shape
        self.in_shape, self.out_shape = (n, d), (n, d_out)
        self.dtype, self.device = kernel.output.dtype, kernel.output.device

    @property
    def noise(self) -> float:
        return self._kernel.noise

    @property
    def heavy(self) -> bool:
        return self._kernel.heavy

    def refined(self):
        kernel = self._kernel.refined()
        return None if kernel is None else self._with(kernel)

    def tiled(self) -> "_AttentionJacobian":
        """The same Jacobian on a kernel whose weights are within reach."""
        return self._with(self._kernel.tiled())

    def _with(self, kernel: SoftmaxAttention) -> "_AttentionJacobian":
        shape = (self.batch, *self.in_shape)
        return _AttentionJacobian(self._layer, kernel, shape, self.out_shape[-1], self._q_slope, self._k_slope)

    def _push(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens' directions → those of queries, keys and values."""
        dq, dk, dv = self._layer._project(v, with_bias=False)
        dq = dq if self._q_slope is None else self._q_slope.jvp(dq)
        dk = dk if self._k_slope is None else self._k_slope.jvp(dk)
        rotary = self._layer.rotary
        return (dq, dk, dv) if rotary is None else (rotary.turn(dq), rotary.turn(dk), dv)

    def _pull(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """The transpose of `_push`."""
        rotary = self._layer.rotary
        if rotary is not None:
            dq, dk = rotary.turn(dq, back=True), rotary.turn(dk, back=True)
        dq = dq if self._q_slope is None else self._q_slope.vjp(dq)
        dk = dk if self._k_slope is None else self._k_slope.vjp(dk)
        return self._layer._unproject(dq, dk, dv)

    @torch.no_grad()
    def jvp(self, v):
        layer = self._layer
        o = layer._concat(self._kernel.jvp(*self._push(v)))
        return o if layer.w_o is None else o @ layer.w_o.mT

    @torch.no_grad()
    def vjp(self, u):
        layer = self._layer
        t = u if layer.w_o is None else u @ layer.w_o
        return self._pull(*self._kernel.vjp(layer._split(t)))

    @functools.cached_property
    def _gram_o(self) -> Tensor | None:
        """`WₒᵀWₒ`, which stands for `Wₒ` and then `Wₒᵀ` in products with `JᵀJ`; nothing where `Wₒ` is the cheaper one."""
        w_o = self._layer.w_o
        return w_o.mT @ w_o if w_o is not None and w_o.shape[1] < 2 * w_o.shape[0] else None

    @torch.no_grad()
    def gram(self, v):
        if self._gram_o is None:
            return super().gram(v)
        layer, kernel = self._layer, self._kernel
        o = layer._concat(kernel.jvp(*self._push(v)))
        weighted = o @ self._gram_o
        return self._pull(*kernel.vjp(layer._split(weighted))), inner(o, weighted)

    @torch.no_grad()
    def guess(self):
        """Exact when all heads share one rank-one `P`: the attention each token receives, times the top input of `Wₒ W_v`."""
        layer = self._layer
        w = layer.w_v.unflatten(0, (layer._kv_heads, -1))
        w = w.repeat_interleave(layer.heads // layer._kv_heads, 0).flatten(0, 1)
        w = w if layer.w_o is None else layer.w_o @ w
        u = torch.randn(layer.width, 1, generator=torch.Generator().manual_seed(0)).to(w)
        for _ in range(20):
            u = w.mT @ (w @ u)
            u = u / u.norm().clamp_min(torch.finfo(u.dtype).tiny)
        return self._kernel.attention_received()[..., None] * u[:, 0]

    def select(self, items):
        layer = self._layer
        if layer.attention_mask is not None:
            layer = replace(layer, attention_mask=layer.attention_mask[items])
        if layer.rotary is not None:
            layer = replace(layer, rotary=layer.rotary.select(items))
        shape = (len(items), *self.in_shape)
        slopes = [None if s is None else s.select(items) for s in (self._q_slope, self._k_slope)]
        return _AttentionJacobian(layer, self._kernel.select(items), shape, self.out_shape[-1], slopes[0], slopes[1])
