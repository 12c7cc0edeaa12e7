"""Multi-head self-attention of any kind as a map with a closed-form Jacobian."""

import functools
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from howsmooth.errors import BadInputError
from howsmooth.kernels import Mask, Scores, linearize, plain_attention
from howsmooth.kernels.kinds import Kind, Softmax
from howsmooth.kernels.tensors import check_dense, check_tensor, described, float32_products
from howsmooth.maps.atoms import CountedAttention, OnMeasure, no_measures
from howsmooth.maps.base import Map
from howsmooth.maps.gate import check_layer
from howsmooth.maps.jacobian import AttentionJacobian, NormJacobian, over_heads
from howsmooth.maps.norms import LayerNorm, RMSNorm
from howsmooth.maps.rotary import Rotary
from howsmooth.measures.measure import Measure
from howsmooth.settings import whole


class HeadWeights(NamedTuple):
    """A layer's weights by query head, in float64; keys and values of a group repeated, the identity where there are none."""

    q: Float[Tensor, "heads d_h d"]
    k: Float[Tensor, "heads d_h d"]
    v: Float[Tensor, "heads d_v d"]
    o: Float[Tensor, "heads d_out d_v"]
    b_q: Float[Tensor, "heads d_h"]
    b_k: Float[Tensor, "heads d_h"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Attention(Map):
    """Self-attention `x ↦ W_o concat_h(P_h v_h) + b_o` with `P_h = softmax(scale · q_h k_hᵀ)`, or weights of another kind.

    Its derivative is docs/explanation/theory.md §1.

    Attributes:
        w_q: Weights of queries, shaped like `nn.Linear.weight`: (out, in).
        w_k: Weights of keys; None takes the tokens themselves.
        w_v: Weights of values.
        w_o: The output projection; None leaves the heads concatenated.
        heads: How many heads.
        kv_heads: How many heads keys and values have, where query heads share them; `heads` by default.
        b_q: A bias of queries.
        b_k: A bias of keys.
        b_v: A bias of values.
        b_o: A bias of the output.
        scale: Of the logits; by default what the kind's source takes, for softmax `1/√(head width)`.
        softcap: Bounds logits to `softcap·tanh(s/softcap)`.
        causal: Whether a token sees only those before it and itself.
        window: A token sees those with `|i − j| < window`.
        bias: Added to the logits, after the soft-cap.
        attention_mask: (batch, n), true at real tokens. The others are no part of the input: not visible and not measured.
        q_norm: Normalises queries, every head by itself (Qwen3, Gemma 3), or all heads together where the norm is as wide as
            they are (OLMo 2).
        k_norm: Normalises keys in the same way.
        rotary: Turns queries and keys by their positions, after the norms (Llama).
        kind: How weights come from queries and keys: one of `howsmooth.kinds` (docs/reference/kinds.md).

    >>> attn = Attention.from_matrices(torch.zeros(2, 2), torch.eye(2))
    >>> attn(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """

    w_q: Float[Tensor, "q_width d"]
    w_k: Float[Tensor, "k_width d"] | None
    w_v: Float[Tensor, "v_width d"]
    w_o: Float[Tensor, "d_out o_width"] | None = None
    heads: int = 1
    kv_heads: int = None  # pyright: ignore[reportAssignmentType]  None is filled in
    b_q: Float[Tensor, " q_width"] | None = None
    b_k: Float[Tensor, " k_width"] | None = None
    b_v: Float[Tensor, " v_width"] | None = None
    b_o: Float[Tensor, " d_out"] | None = None
    scale: float = None  # pyright: ignore[reportAssignmentType]  None is filled in
    softcap: float | None = None
    causal: bool = False
    window: int | None = None
    bias: Float[Tensor, "#batch #heads #n m"] | None = None
    attention_mask: Bool[Tensor, "batch n"] | None = None
    q_norm: LayerNorm | RMSNorm | None = None
    k_norm: LayerNorm | RMSNorm | None = None
    rotary: Rotary | None = None
    kind: Kind = field(default_factory=Softmax)

    def __post_init__(self):
        check_layer(self)

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
        check_dense(A, "A")
        if not isinstance(A, Tensor) or A.ndim not in (2, 3) or A.shape[-1] != A.shape[-2]:
            raise BadInputError(f"expected a square A, (d, d) or (heads, d, d), got {described(A)}; A acts on one token")
        check_tensor(A, "A", tuple(A.shape), "A acts on one token", finite=False)
        check_tensor(V, "V", (*A.shape[:-2], "d_out", A.shape[-1]), "give one matrix per A, of its width", finite=False)
        if A.ndim == 2:
            return cls(A, None, V, scale=1.0, causal=causal, window=window)
        heads, d = A.shape[:2]
        eye = torch.eye(d, dtype=A.dtype, device=A.device)
        add = torch.eye(V.shape[1], dtype=V.dtype, device=V.device).repeat(1, heads)
        return cls(A.flatten(0, 1), eye.repeat(heads, 1), V.flatten(0, 1), add, heads, scale=1.0, causal=causal, window=window)

    @classmethod
    def from_module(cls, module: nn.MultiheadAttention, *, causal: bool = False) -> "Attention":
        """The self-attention of torch's own module, without its dropout.

        >>> Attention.from_module(nn.MultiheadAttention(8, 2, batch_first=True))
        Attention(8 → 8, 2 heads of 4, float32)
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise BadInputError(
                f"expected a torch.nn.MultiheadAttention, got {type(module).__name__}; pass a model to howsmooth.load, whose "
                "capture gives its layers"
            )
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            raise BadInputError(
                "expected self-attention on tokens of one width, got a module with keys, values or extra tokens of its own; "
                "pass it to howsmooth.load and measure it"
            )
        w_q, w_k, w_v = module.in_proj_weight.detach().chunk(3)
        b_q, b_k, b_v = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.detach().chunk(3)
        out = module.out_proj
        b_o = None if out.bias is None else out.bias.detach()
        return cls(
            w_q, w_k, w_v, out.weight.detach(), heads=module.num_heads, b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o, causal=causal
        )

    @property
    def width(self) -> int:
        return self.w_q.shape[1]

    @property
    def out_width(self) -> int:
        return self.w_v.shape[0] // self.kv_heads * self.heads if self.w_o is None else self.w_o.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        kinds = [w.dtype for w in (self.w_q, self.w_k, self.w_v, self.w_o) if w is not None]
        return functools.reduce(torch.promote_types, kinds)

    @property
    def device(self) -> torch.device:
        return self.w_q.device

    @property
    def coupled(self) -> bool:
        """Whether a norm on queries or keys goes over several heads together."""
        return any(norm is not None and norm.width != self.part_width for norm in (self.q_norm, self.k_norm))

    @property
    def nbytes(self) -> int:
        """The memory that its weights take."""
        return sum(w.nbytes for w in (self.w_q, self.w_k, self.w_v, self.w_o, self.bias) if w is not None)

    @property
    def head_width(self) -> int:
        """The width of a query or key."""
        return self.w_q.shape[0] // self.heads

    @property
    def part_width(self) -> int:
        """The width of what logits are made of: of a query or key, or of the parts that its kind cuts it into."""
        return self.head_width // self.kind.parts

    def __repr__(self) -> str:
        shared = "" if self.kv_heads == self.heads else f", {self.kv_heads} for keys and values"
        heads = f"{self.heads} {'head' if self.heads == 1 else 'heads'} of {self.head_width}"
        said = [f"{self.width} → {self.out_width}", heads + shared]
        said += ["causal"] * self.causal + [f"window {self.window}"] * (self.window is not None)
        more = ("softcap", "bias", "attention_mask", "q_norm", "k_norm", "rotary")
        said += [name for name in more if getattr(self, name) is not None]
        said += [] if self.kind.traits.plain else [repr(self.kind)]
        return f"Attention({', '.join(said)}, {str(self.dtype).removeprefix('torch.')})"

    def moved(self, device, dtype):
        here = {f.name: getattr(self, f.name) for f in fields(self)}
        moves = Tensor | LayerNorm | RMSNorm | Rotary
        there = {k: t.to(device, dtype) for k, t in here.items() if k == "kind" or isinstance(t, moves)}
        if self.attention_mask is not None:
            there["attention_mask"] = self.attention_mask.to(device, torch.bool)
        return self if all(t is here[k] for k, t in there.items()) else replace(self, **there)

    def head(self, index: int) -> "Attention":
        """One head alone: its queries, its group's keys and values, its columns of the output projection, no output bias.

        Where a norm couples the heads they all stay, and the other columns of the output projection are zero.

        >>> Attention(torch.eye(4), torch.eye(4), torch.eye(4), torch.eye(4), heads=2).head(1)
        Attention(4 → 4, 1 head of 2, float32)
        """
        index = whole(index, f"a head from 0 to {self.heads - 1}", "this layer has no other", below=self.heads)
        if self.coupled:
            w_o = torch.eye(self.out_width).to(self.w_v) if self.w_o is None else self.w_o
            own = torch.zeros_like(w_o).unflatten(1, (self.heads, -1))
            own[:, index] = w_o.unflatten(1, (self.heads, -1))[:, index]
            return replace(self, w_o=own.flatten(1), b_o=None)
        group = index // (self.heads // self.kv_heads)
        changed: dict[str, Tensor | None] = {}
        for name, parts, part in (("q", self.heads, index), ("k", self.kv_heads, group), ("v", self.kv_heads, group)):
            for t in (f"w_{name}", f"b_{name}"):
                rows = getattr(self, t)
                changed[t] = None if rows is None else rows.unflatten(0, (parts, -1))[part]
        w_o = None if self.w_o is None else self.w_o.unflatten(1, (self.heads, -1))[:, index]
        bias = self.bias if self.bias is None or self.bias.shape[1] == 1 else self.bias[:, index : index + 1]
        return replace(self, **changed, w_o=w_o, b_o=None, heads=1, kv_heads=1, bias=bias, kind=self.kind.head(index))

    def by_head(self) -> HeadWeights:
        """All heads' weights side by side, in float64."""
        eye = torch.eye(self.width, dtype=torch.float64, device=self.w_q.device)

        def rows(t: Tensor, parts: int) -> Tensor:
            return t.double().unflatten(0, (parts, -1)).repeat_interleave(self.heads // parts, 0)

        q, v = rows(self.w_q, self.heads), rows(self.w_v, self.kv_heads)
        k = rows(eye if self.w_k is None else self.w_k, self.kv_heads)
        d_v = v.shape[1]
        o = torch.eye(self.heads * d_v, dtype=eye.dtype, device=eye.device) if self.w_o is None else self.w_o.double()
        b_q = q.new_zeros(q.shape[:2]) if self.b_q is None else rows(self.b_q, self.heads)
        b_k = k.new_zeros(k.shape[:2]) if self.b_k is None else rows(self.b_k, self.kv_heads)
        return HeadWeights(q, k, v, o.unflatten(1, (self.heads, d_v)).transpose(0, 1), b_q, b_k)

    def on(self, measure: Measure) -> "AtomAttention | CountedAttention":
        """Attention to atoms: `log a_j` joins the logits of atom j, masks by positions (docs/explanation/meanfield.md §5.1).

        What it is for other kinds, and which have none: docs/explanation/kinds.md 8.12.
        """
        why = no_measures(self.kind)
        if why is not None:
            raise BadInputError(f"expected a kind of attention that is a map of measures, got {self.kind!r}; {why}")
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
        if not self.kind.traits.takes_masses:
            visible = None if ends is None else (torch.arange(len(measure)) < ends[:, None]).to(measure.mass.device)
            return CountedAttention(self, measure.mass, visible)
        bias = measure.mass.log()[None, None, None]
        return AtomAttention(self, Scores(self.scale, self.softcap, Mask(bias=bias, ends=ends), self.kind))

    def _scores(self) -> Scores:
        return Scores(self.scale, self.softcap, Mask(self.causal, self.window, self.attention_mask, self.bias), self.kind)

    def value(self, x, scores: Scores | None = None):
        """scores: those of atoms, where `x` are some."""
        return self.finish(plain_attention(*self.vectors(x), scores or self._scores()))

    def vectors(self, x: Float[Tensor, "batch n d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as attention takes them, (batch, heads, n, ·): normalised and turned."""
        q, k, v = self.project(x, with_bias=True)
        q = q if self.q_norm is None else over_heads(self.q_norm.value, q, self.q_norm.width)
        k = k if self.k_norm is None else over_heads(self.k_norm.value, k, self.k_norm.width)
        return *self._turn(x, q, k), v

    @torch.no_grad()
    @float32_products()
    def linearize(self, x: Float[Tensor, "batch n d"], scores: Scores | None = None) -> tuple[Tensor, "AttentionJacobian"]:
        """scores: those of atoms, where `x` are some."""
        layer = self.to(x.device, x.dtype)
        q, k, v = layer.project(x, with_bias=True)
        (q, q_slope), (k, k_slope) = _normed(layer.q_norm, q), _normed(layer.k_norm, k)
        q, k = layer._turn(x, q, k)
        kernel = linearize(q, k, v, scores or self._scores())
        value = layer.finish(kernel.output)
        if not bool(value.isfinite().all()):
            raise BadInputError(f"expected outputs within the range of {x.dtype}, got infinity; use float64 or smaller weights")
        return value, AttentionJacobian(layer, kernel, q_slope, k_slope, x)

    def _turn(self, x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.rotary is None:
            return q, k
        self.rotary.check(*x.shape[:2])
        return self.rotary.turn(q), self.rotary.turn(k)

    def finish(self, o: Float[Tensor, "batch heads n d_v"]) -> Float[Tensor, "batch n d_out"]:
        """Heads' outputs → the layer's."""
        t = self.concat(o[None])[0]
        t = t if self.w_o is None else t @ self.w_o.mT
        return t if self.b_o is None else t + self.b_o

    def project(self, x: Tensor, with_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (…, n, d) → queries, keys, values (…, heads, n, head width), where a head has parts each by itself."""
        parts, cut = [], self.kind.parts
        for weight, bias, heads in (
            (self.w_q, self.b_q, self.heads * cut),
            (self.w_k, self.b_k, self.kv_heads * cut),
            (self.w_v, self.b_v, self.kv_heads),
        ):
            t = x if weight is None else x @ weight.mT
            if with_bias and bias is not None:
                t = t + bias
            parts.append(t.unflatten(-1, (heads, -1)).transpose(-3, -2))
        return parts[0], parts[1], parts[2]

    def concat(self, o: Float[Tensor, "probes batch heads n d_v"]) -> Float[Tensor, "probes batch n o_width"]:
        """Heads → tokens; tokens that are not real give zero."""
        t = o.transpose(-3, -2).flatten(-2)
        return t if self.attention_mask is None else t * self.attention_mask[..., None]

    def unconcat(self, t: Float[Tensor, "probes batch n o_width"]) -> Float[Tensor, "probes batch heads n d_v"]:
        """The transpose of `concat`."""
        t = t if self.attention_mask is None else t * self.attention_mask[..., None]
        return t.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def unproject(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """The transpose of `project`."""
        dq, dk, dv = (t.transpose(-3, -2).flatten(-2) for t in (dq, dk, dv))
        total = dq @ self.w_q
        total += dk if self.w_k is None else dk @ self.w_k
        total += dv @ self.w_v
        return total


def as_map(f: Any) -> Any:
    """Torch's own attention as self-attention, which is a map; anything else as it is."""
    return Attention.from_module(f) if isinstance(f, nn.MultiheadAttention) else f


def _normed(
    norm: LayerNorm | RMSNorm | None, t: Float[Tensor, "batch heads n d_h"]
) -> tuple[Float[Tensor, "batch heads n d_h"], NormJacobian | None]:
    """Queries or keys behind their norm, and its Jacobian, over every head or over all of them, (batch, n, all heads)."""
    if norm is None:
        return t, None
    slopes: list[NormJacobian] = []

    def value(t: Tensor) -> Tensor:
        y, slope = norm.linearize(t)
        slopes.append(slope)
        return y

    return over_heads(value, t, norm.width), slopes[0]


@final
@dataclass(frozen=True, eq=False, repr=False)
class AtomAttention(OnMeasure):
    """As a layer on tokens, with masses and positions in its scores."""

    scores: Scores

    def moved(self, device, dtype):
        return replace(self, layer=self.layer.to(device, dtype))

    def value(self, x):
        return self.layer.value(x, self.scores)

    def linearize(self, x):
        return self.layer.linearize(x, self.scores)
