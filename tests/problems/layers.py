"""Random attention problems of every shape and mask the package takes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from howsmooth.kernels import AttentionKernel, Mask, Scores, plain_attention
from howsmooth.maps import Attention, LayerNorm, RMSNorm, Rotary
from howsmooth.spectral import Operator

BIAS_SHAPES = [(b, h, n) for b in (False, True) for h in (False, True) for n in (False, True)]


def gaussian(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_layer(seed: int, n: int = 0, width: int = 0) -> tuple[Attention, Tensor]:
    """A softmax layer at tokens, both in float32, small enough for its whole spectrum and often too large to be decomposed.

    3 to 24 tokens of width 16 to 64, one to four heads, logits from flat to saturated, causal or not, biased or not, values of
    full rank or of rank two, now and then one token that is much longer than the others.
    """
    random = torch.Generator().manual_seed(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=random))]

    n, width = n or int(torch.randint(3, 25, (), generator=random)), width or pick(16, 32, 32, 48, 64)
    heads, causal, rank = pick(1, 2) if width % 4 else pick(1, 2, 4), pick(False, True), pick(width, width, width, 2)
    scales = 0.3 * 20 ** torch.rand(4, generator=random)
    w_q, w_k, w_v, w_o = (c * torch.randn(width, width, generator=random) / width**0.5 for c in scales)
    w_o = w_o[:, :rank] @ torch.randn(rank, width, generator=random) / width**0.5 if rank < width else w_o
    b_v = torch.randn(width, generator=random) if pick(False, True) else None
    x = torch.randn(n, width, generator=random)
    x[0] *= pick(1.0, 1.0, 1.0, 10.0)
    return Attention(w_q, w_k, w_v, w_o, heads=heads, causal=causal, b_v=b_v), x


@dataclass(frozen=True)
class Problem:
    """Softmax attention's inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Scores

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def to(self, dtype: torch.dtype) -> "Problem":
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def kernel(self, kind: Callable[..., AttentionKernel], *size) -> AttentionKernel:
        return kind(*self.qkv, self.scores, *size)

    def value(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The plain reference as a function of three tensors."""
        return plain_attention(q, k, v, self.scores)

    def weights(self) -> Tensor:
        """`P`, (batch, heads, n, m): attention whose values are the unit vectors."""
        batch, kv_heads, m, _ = self.k.shape
        return self.value(self.q, self.k, torch.eye(m, dtype=self.q.dtype).expand(batch, kv_heads, m, m))


def problem(
    *,
    batch: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    n: int = 7,
    m: int | None = None,
    d: int = 3,
    d_v: int = 2,
    mask: Mask | None = None,
    softcap: float | None = None,
    logit: float = 1.0,
    seed: int = 0,
) -> Problem:
    """Gaussian queries, keys and values with logits of about `logit`, float64."""
    m, kv_heads = m or n, kv_heads or heads
    q = gaussian(batch, heads, n, d, seed=seed) * logit**0.5
    k = gaussian(batch, kv_heads, m, d, seed=seed + 1) * logit**0.5
    v = gaussian(batch, kv_heads, m, d_v, seed=seed + 2)
    return Problem(q, k, v, Scores(d**-0.5, softcap, mask or Mask()))


def key_mask(batch: int, m: int, seed: int = 0) -> Tensor:
    """Two keys in three, at random; the last sequence may lose all of them."""
    return gaussian(batch, m, seed=seed) > -0.4


def bias(shape: tuple[int, ...], *, hidden: float = 0.0, seed: int = 0) -> Tensor:
    """Gaussian, with a share of −inf."""
    t = gaussian(*shape, seed=seed)
    holes = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < hidden
    return t.masked_fill(holes, -torch.inf)


def lost_rows(n: int, m: int, rows: list[int]) -> Tensor:
    """A bias that hides every key from some queries."""
    t = gaussian(1, 1, n, m, seed=5)
    t[:, :, rows] = -torch.inf
    return t


def ties(n: int) -> Tensor:
    """Rows in groups of two, three, two, three …: each sees its whole group and all before it."""
    group = torch.tensor([2, 3]).repeat(n).cumsum(0)
    return torch.tensor([min(n, int(group[group > i][0])) for i in range(n)])


def masks(batch: int, heads: int, n: int) -> dict[str, Mask]:
    """One mask of each family."""
    return {
        "full": Mask(),
        "causal": Mask(causal=True),
        "window": Mask(window=3),
        "window of one": Mask(window=1),
        "causal window": Mask(causal=True, window=2),
        "keys": Mask(keys=key_mask(batch, n)),
        "causal keys": Mask(causal=True, keys=key_mask(batch, n)),
        "no keys": Mask(keys=torch.zeros(batch, n, dtype=torch.bool)),
        "lost rows": Mask(bias=lost_rows(n, n, [0, n - 1])),
        "causal holes": Mask(causal=True, bias=bias((1, heads, n, n), hidden=0.4)),
        "ties": Mask(ends=ties(n)),
        "weighted ties": Mask(bias=bias((1, 1, 1, n)), ends=ties(n)),
        "late ties": Mask(ends=(ties(n) - 2).clamp_min(0)),
        "everything": Mask(True, 3, key_mask(batch, n), bias((batch, heads, n, n), hidden=0.2)),
    } | {
        f"bias {b:d}{h:d}{r:d}": Mask(bias=bias((batch if b else 1, heads if h else 1, n if r else 1, n), hidden=0.2))
        for b, h, r in BIAS_SHAPES
    }


MASK_NAMES = list(masks(1, 1, 2))


@st.composite
def mask_strategy(draw, batch: int, heads: int, n: int, m: int) -> Mask:
    """Any combination of band, padding and bias."""
    square = n == m
    shape = draw(st.none() | st.sampled_from(BIAS_SHAPES))
    seed = draw(st.integers(0, 99))
    return Mask(
        causal=square and draw(st.booleans()),
        window=draw(st.none() | st.integers(1, n + 1)) if square else None,
        keys=key_mask(batch, m, seed) if draw(st.booleans()) else None,
        bias=None
        if shape is None
        else bias((*(s if wide else 1 for s, wide in zip((batch, heads, n), shape, strict=True)), m), hidden=0.3, seed=seed),
    )


@st.composite
def problems(draw) -> Problem:
    """Small problems of odd shapes: one token, one channel, grouped heads, more keys than queries."""
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    batch, n = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 5, 8]))
    m = draw(st.sampled_from([n, n, n + 2]))
    return problem(
        batch=batch,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        n=n,
        m=m,
        d=draw(st.integers(1, 3)),
        d_v=draw(st.integers(1, 3)),
        mask=draw(mask_strategy(batch, kv_heads * group, n, m)),
        softcap=draw(st.sampled_from([None, None, 0.5, 5.0])),
        logit=draw(st.sampled_from([0.0, 1.0, 20.0])),
        seed=draw(st.integers(0, 999)),
    )


class KernelJacobian(Operator):
    """A kernel as an operator on `q, k, v` laid end to end, so that it meets the operators' contract."""

    def __init__(self, kernel: AttentionKernel, inputs: tuple[Tensor, Tensor, Tensor]):
        self.kernel, self._inputs = kernel, inputs
        self._shapes = [t.shape[1:] for t in inputs]
        self.batch, self.out_shape = len(inputs[0]), tuple(kernel.output.shape[1:])
        self.in_shape = (sum(s.numel() for s in self._shapes),)
        self.dtype, self.device = inputs[0].dtype, inputs[0].device

    def jvp(self, v):
        return self.kernel.jvp(*self.split(v))

    def vjp(self, u):
        return self.join(self.kernel.vjp(u))

    def select(self, items):
        q, k, v = (t[items] for t in self._inputs)
        return KernelJacobian(self.kernel.select(items), (q, k, v))

    def split(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = t.split([s.numel() for s in self._shapes], -1)
        q, k, v = (p.unflatten(-1, s) for p, s in zip(parts, self._shapes, strict=True))
        return q, k, v

    def join(self, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return torch.cat([p.flatten(-3) for p in parts], -1)


@dataclass(frozen=True)
class LayerProblem:
    """A layer and tokens for it."""

    layer: Attention
    x: Tensor


@st.composite
def layers(draw) -> LayerProblem:
    """Layers as models have them, with any of their options, and small batches of tokens."""
    batch, n = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 4]))
    kv_heads, group, head, d_v = (draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3)), 2)
    heads = kv_heads * group
    tokens_are_keys = draw(st.booleans())
    d = kv_heads * head if tokens_are_keys else draw(st.integers(1, 4))
    d_out = draw(st.sampled_from([None, 1, d, 9]))
    out = heads * d_v if d_out is None else d_out
    seed = draw(st.integers(0, 999))

    def optional(*shape: int) -> Tensor | None:
        return gaussian(*shape, seed=seed + sum(shape)) if draw(st.booleans()) else None

    mask = draw(mask_strategy(batch, heads, n, n))
    padding = draw(st.none() | st.integers(1, n))
    layer = Attention(
        w_q=gaussian(heads * head, d, seed=seed),
        w_k=None if tokens_are_keys else gaussian(kv_heads * head, d, seed=seed + 1),
        w_v=gaussian(kv_heads * d_v, d, seed=seed + 2),
        w_o=None if d_out is None else gaussian(d_out, heads * d_v, seed=seed + 3),
        heads=heads,
        kv_heads=draw(st.sampled_from([kv_heads, None])) if group == 1 else kv_heads,
        b_q=optional(heads * head),
        b_k=optional(kv_heads * head),
        b_v=optional(kv_heads * d_v),
        b_o=optional(out),
        scale=draw(st.sampled_from([None, 0.3, -1.0])),
        softcap=draw(st.sampled_from([None, 2.0])),
        causal=mask.causal,
        window=mask.window,
        bias=mask.bias,
        attention_mask=None if padding is None else (torch.arange(n) < padding).expand(batch, n).contiguous(),
    )
    return LayerProblem(layer, gaussian(batch, n, d, seed=seed + 4))


def turned(layer: Attention, n: int, *, q: int, k: int, phases: int, seed: int) -> Attention:
    """The layer with norms on queries (`q`) and keys (`k`) and rotary phases: 0 none, 1 and 2 two kinds of each.

    3 and 4: those norms over all heads together.
    """
    head = layer.w_q.shape[0] // layer.heads
    eps = (0.3, 1e-3)[seed % 2]

    def norm(kind: int, heads: int, seed: int) -> LayerNorm | RMSNorm | None:
        if kind == 0:
            return None
        width = head if kind < 3 else heads * head
        weight = gaussian(width, seed=seed)
        return RMSNorm(weight, eps=eps) if kind % 2 else LayerNorm(weight, gaussian(width, seed=seed + 1), eps=eps)

    rotary = None
    if phases and head >= 2:
        width = head // 2 * 2 if phases == 1 else 2  # the whole head, or two of its entries
        rotary = Rotary.from_base(width, n + seed % 2, base=(10.0, 10000.0)[seed % 2], interleaved=phases == 2)
    return replace(layer, q_norm=norm(q, layer.heads, seed + 5), k_norm=norm(k, layer.kv_heads, seed + 7), rotary=rotary)


@st.composite
def turned_layers(draw) -> LayerProblem:
    """Any layer with any norms and phases on its queries and keys."""
    case = draw(layers())
    kinds = [draw(st.integers(0, most)) for most in (4, 4, 2)]
    seed = draw(st.integers(0, 99))
    return LayerProblem(turned(case.layer, case.x.shape[1], q=kinds[0], k=kinds[1], phases=kinds[2], seed=seed), case.x)
