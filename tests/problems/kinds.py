"""Random problems of every kind of attention."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from howsmooth.kernels import Mask, Scores
from howsmooth.kernels.kinds import L2, Cosine, Differential, Hard, Kind, Linear, Sigmoid, Sinkhorn, Softmax
from howsmooth.maps import Attention
from problems.layers import Problem, gaussian, mask_strategy


def kinds(heads: int) -> dict[str, Kind]:
    """One of each kind and of each of its settings, for a layer of so many heads."""
    return {
        "softmax": Softmax(),
        "sink": Softmax(gaussian(heads, seed=41)),
        "sigmoid": Sigmoid(),
        "sigmoid with a bias": Sigmoid(-0.5),
        "l2": L2(),
        "cosine": Cosine(epsilon=0.01),
        "cosine of queries and keys": Cosine(values=False, factor=1.5),
        "linear": Linear(),
        "linear of relu": Linear("relu"),
        "linear without sums": Linear(normalized=False),
        "one iteration": Sinkhorn(1),
        "three iterations": Sinkhorn(3),
        "four iterations": Sinkhorn(4),
        "doubly stochastic": Sinkhorn(None),
        "differential": Differential(0.6),
        "normed differential": Differential(0.6, epsilon=1e-2, factor=0.4),
        "hard": Hard(),
        "top three": Hard(3),
    }


KIND_NAMES = list(kinds(1))


def kind_problem(
    name: str,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    n: int = 7,
    m: int | None = None,
    d: int = 4,
    d_v: int = 3,
    mask: Mask | None = None,
    softcap: float | None = None,
    logit: float = 1.0,
    seed: int = 0,
) -> Problem:
    """Gaussian queries, keys and values with logits of about `logit`, float64. d: the width of a head, even for halves."""
    kind = kinds(heads)[name]
    parts, width = kind.parts, d // kind.parts
    q = gaussian(batch, heads * parts, n, width, seed=seed) * logit**0.5
    k = gaussian(batch, kv_heads * parts, m or n, width, seed=seed + 1) * logit**0.5
    v = gaussian(batch, kv_heads, m or n, d_v, seed=seed + 2)
    return Problem(q, k, v, Scores(kind.scale(width), softcap, mask or Mask(), kind))


@st.composite
def kind_problems(draw, name: str) -> Problem:
    """Small problems of odd shapes, with whatever masks and caps the kind has a form for."""
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    batch, n = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 5, 8]))
    m = draw(st.sampled_from([n, n, n + 2])) if "iteration" not in name and "stochastic" not in name else n
    softcap = draw(st.sampled_from([None, None, 0.5, 5.0]))
    mask = draw(mask_strategy(batch, kv_heads * group, n, m))
    shape = {"batch": batch, "heads": kv_heads * group, "kv_heads": kv_heads, "n": n, "m": m}
    sizes = {"d": 2 * draw(st.integers(1, 2)), "d_v": draw(st.integers(1, 3)), "seed": draw(st.integers(0, 999))}
    logit = draw(st.sampled_from([0.0, 1.0, 20.0]))
    if name.startswith(("l2", "linear")):
        softcap = None
    if name.startswith("linear"):
        mask = replace(mask, bias=None)
    if "iteration" in name or "stochastic" in name:  # which balance the columns too: a hidden key has none
        finite = mask.bias is None or bool(mask.bias.isfinite().all())
        mask = replace(mask, causal=False, bias=mask.bias if finite else None)
    if "stochastic" in name:  # with a band or large logits the limit is far, and its system as badly conditioned as one likes
        mask, logit = replace(mask, window=None, bias=None), min(logit, 1.0)
    return kind_problem(name, **shape, **sizes, mask=mask, softcap=softcap, logit=logit)


def layer_of(kind: Any, *, d: int = 8, heads: int = 2, kv_heads: int | None = None, seed: int = 0, **more) -> Attention:
    """A layer of a kind with Gaussian weights, float64."""
    kv_heads = kv_heads or heads
    w_q, w_v, w_o = (gaussian(r, d, seed=seed + i) / d**0.5 for i, r in enumerate((d, d // heads * kv_heads, d)))
    tied = isinstance(kind, L2) and kind.tied
    w_k = None if tied else gaussian(d // heads * kv_heads, d, seed=seed + 3) / d**0.5
    return Attention(w_q, w_k, w_v, w_o, heads=heads, kv_heads=kv_heads, kind=kind, **more)


def dense_weights(p: Problem) -> torch.Tensor:
    """`P` of a problem written down once more, entry by entry, without the package's own words for it."""
    kind, (batch, heads, n, _), m = p.scores.kind, p.q.shape, p.k.shape[2]
    group, tau = heads // p.k.shape[1], p.scores.scale
    out = torch.zeros(batch, heads, n, m, dtype=p.q.dtype)
    for b in range(batch):
        for h in range(heads):
            q, k = p.q[b, h], p.k[b, h // group]
            if isinstance(kind, L2):
                s = -tau * (q[:, None] - k).square().sum(-1)
            elif isinstance(kind, Cosine):
                q, k = (t / (t.square().sum(-1, keepdim=True) + kind.epsilon).sqrt() for t in (q, k))
                s = tau * q @ k.T
            else:
                s = tau * q @ k.T
            seen = p.scores.mask.visible(slice(0, n), slice(0, m), s.device)
            if p.scores.mask.keys is not None:
                seen = seen & p.scores.mask.keys[b]
            out[b, h] = _weights(kind, s, seen, q, k, h)
    return out


def _weights(kind: Kind, s: torch.Tensor, seen: torch.Tensor, q: torch.Tensor, k: torch.Tensor, h: int) -> torch.Tensor:
    e = torch.exp(s) * seen
    if isinstance(kind, Sigmoid):
        b = -torch.tensor(float(seen.any(0).sum())).double().log() if kind.bias is None else kind.bias
        return seen / (1 + torch.exp(-s - b))
    if isinstance(kind, Linear):
        phi = (lambda t: t.clamp_min(0)) if kind.features == "relu" else (lambda t: torch.nn.functional.elu(t) + 1)
        w = (phi(q) @ phi(k).T) * seen
        total = w.sum(-1, keepdim=True)
        return w / torch.where(total > 0, total, 1.0) if kind.normalized else w
    if isinstance(kind, Hard):
        first = s.masked_fill(~seen, -torch.inf).argsort(-1, descending=True)[:, : kind.top]
        w = torch.zeros_like(s).scatter(1, first, 1.0) * seen
        return w / w.sum(-1, keepdim=True)
    if isinstance(kind, Sinkhorn):
        for step in range(kind.iterations or 4000):
            sums = e.sum(1 - step % 2, keepdim=True)
            e = e / torch.where(sums > 0, sums, 1.0)
        return e
    sink = kind.sink[h].exp() if isinstance(kind, Softmax) and kind.sink is not None else 0.0
    return e / (e.sum(-1, keepdim=True) + sink)
