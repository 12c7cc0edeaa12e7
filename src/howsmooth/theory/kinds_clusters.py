"""What a few clusters of equal tokens attain, for every kind of attention: lower bounds over the ball (8.10).

All tokens of a cluster move together. That leaves a map of a few points, with the number of tokens of each in its weights, whose
derivative is no larger than that of all tokens. Numbers such as 8.10 are those of docs/explanation/kinds.md.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.kinds import L2, Cosine, Differential, Hard, Kind, Linear, Sigmoid, Sinkhorn, Softmax
from howsmooth.maps import Attention
from howsmooth.theory.bound import Bound, at_least, first_reason
from howsmooth.theory.constants import Constants
from howsmooth.theory.kinds_slopes import SOURCE

_HEADS = 2  # whose directions are tried
_DENSE = 128  # entries of a few points up to which the derivative is formed
_STEPS = 12  # of power iteration past that
_ROUNDS = 60  # pairs of normalisations for the limit of Sinkhorn; what is further says nothing
_FAR = 1e100  # radius past which nothing is tried
_LARGEST = 1e6  # logits past which float64 says too little of their weights

Points = Float[Tensor, "batch points d"]
Counts = Float[Tensor, "batch points"]


@torch.no_grad()
def clusters(layer: Constants, n: int, radius: float) -> Bound:
    """C1: the best of some configurations of one, two or three clusters."""
    attn = layer.layer
    reason = first_reason(
        (attn.causal, "not for causal attention, where tokens of a cluster differ"),
        (attn.window is not None, "not for a window, where tokens of a cluster differ"),
        (attn.bias is not None, "not for a logit bias"),
        (attn.attention_mask is not None, "the number of real tokens varies with the sequence"),
        (attn.rotary is not None, "not for rotary phases, which turn tokens of a cluster apart"),
    )
    answer = reason if reason is not None else _best(attn, n, radius)
    statement = "Lip ≥ L at clusters: all tokens equal; two clusters; one token between two; at the singular vectors of the weights"
    return at_least("C1", "clusters", statement, f"{SOURCE} 8.10", "no mask, no logit bias, no rotary phases", answer)


def _best(attn: Attention, n: int, radius: float) -> float:
    """log of the largest constant found, less what rounding explains; nothing found is zero."""
    value = best_clusters(attn, n, radius)[0]
    return math.log(value) - 1e-9 if value > 0 else -math.inf


@torch.no_grad()
def best_clusters(attn: Attention, n: int, radius: float) -> tuple[float, Float[Tensor, "points d"], Float[Tensor, " points"]]:
    """The largest constant found, the places of the clusters, and how many tokens are at each."""
    layer = attn.to(torch.float64)
    best = 0.0, torch.zeros(1, attn.width, dtype=torch.float64), torch.full((1,), float(n), dtype=torch.float64)
    if not radius < _FAR:
        return best
    for points, counts in configurations(layer, n, radius):
        values = attained(layer, points, counts)
        top = int(values.argmax())
        if float(values[top]) > best[0]:
            best = float(values[top]), points[top], counts[top]
    return best


def attained(attn: Attention, points: Points, counts: Counts) -> Float[Tensor, " batch"]:
    """The constant of moving clusters as wholes, from below; zero where logits are too large to say."""
    n = int(round(float(counts[0].sum())))
    root = counts.sqrt()[..., None]

    def moved(y: Tensor, count: Tensor) -> Tensor:
        return counted(attn, y[None], count[None], n)[0]

    fine = _fine(attn, points)
    if points[0].numel() <= _DENSE:
        jacobian = torch.func.vmap(torch.func.jacrev(moved))(points, counts)  # (batch, points, out, points, d)
        jacobian = root[..., None, None] * jacobian / root[:, None, None]
        J = jacobian.flatten(3).flatten(1, 2)
        J = torch.where(J.isfinite().all(-1).all(-1)[:, None, None] & fine[:, None, None], J, 0.0)
        return torch.linalg.matrix_norm(J, ord=2)
    v = torch.randn(points.shape, generator=torch.Generator().manual_seed(0), dtype=points.dtype).to(points)

    def forward(y: Tensor) -> Tensor:
        return counted(attn, y, counts, n)

    for _ in range(_STEPS):
        v = v / v.flatten(1).norm(dim=-1)[:, None, None]
        out, pull = torch.func.vjp(forward, points)
        image = torch.func.jvp(forward, (points,), (v / root,))[1] * root
        size = image.flatten(1).norm(dim=-1)
        v = pull(image * root)[0] / root
        v = torch.where(v.isfinite(), v, 0.0) + 1e-300
    return torch.where(fine & size.isfinite(), size, 0.0)


def _fine(attn: Attention, points: Points) -> Float[Tensor, " batch"]:
    """Whether logits are of a size at which float64 still knows their weights."""
    q, k, _ = attn.vectors(points)
    longest = (q.norm(dim=-1).amax((-2, -1)) + k.norm(dim=-1).amax((-2, -1))).square()
    return abs(attn.scale) * longest < _LARGEST


def counted(attn: Attention, x: Points, counts: Counts, n: int) -> Float[Tensor, "batch points d_out"]:
    """The layer's outputs at clusters of that many equal tokens, as a function of where they are, for autodiff."""
    q, k, v = attn.vectors(x)
    kind, log_count = attn.kind, counts.log()[:, None, None]
    k = k.unflatten(1, (attn.kv_heads, -1)).repeat_interleave(attn.heads // attn.kv_heads, 1).flatten(1, 2)
    if isinstance(kind, Cosine):
        q, k = (t / (t.square().sum(-1, keepdim=True) + kind.epsilon).sqrt() for t in (q, k))
        v = kind.factor * (v / (v.square().sum(-1, keepdim=True) + kind.epsilon).sqrt() if kind.values else v)
    v = v.repeat_interleave(attn.heads // attn.kv_heads, 1)
    weights = _weights(attn, kind, q, k, log_count, n)
    if isinstance(kind, Differential):
        weights = weights.unflatten(1, (-1, 2))
        o = (weights[:, :, 0] - kind.lam * weights[:, :, 1]) @ v
        if kind.epsilon is not None:
            o = o / (o.square().mean(-1, keepdim=True) + kind.epsilon).sqrt()
        return attn.finish(kind.factor * o)
    return attn.finish(weights @ v)


def _weights(attn: Attention, kind: Kind, q: Tensor, k: Tensor, log_count: Tensor, n: int) -> Float[Tensor, "batch heads p p"]:
    """What each cluster gets altogether from each."""
    count = log_count.exp()
    if isinstance(kind, Linear):
        features = torch.relu if kind.features == "relu" else lambda t: torch.where(t > 0, t + 1, t.clamp_max(0.0).exp())
        products = features(q) @ features(k).mT * count
        total = products.sum(-1, keepdim=True)
        return products / torch.where(total > 0, total, 1.0) if kind.normalized else products
    s = attn.scale * q @ k.mT
    if isinstance(kind, L2):
        s = -attn.scale * (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
    if attn.softcap is not None:
        s = attn.softcap * (s / attn.softcap).tanh()
    if isinstance(kind, Sigmoid):
        return (s + (-math.log(n) if kind.bias is None else kind.bias)).sigmoid() * count
    if isinstance(kind, Hard):
        return _chosen(s, count, kind.top)
    s = s + log_count
    if isinstance(kind, Softmax) and kind.sink is not None:
        sink = kind.sink.to(s)[:, None, None].expand(*s.shape[:-1], 1)
        return torch.cat([s, sink], -1).softmax(-1)[..., :-1]
    if isinstance(kind, Sinkhorn):
        for step in range(2 * _ROUNDS if kind.iterations is None else kind.iterations):  # rows sum to one, columns to their count
            s = s - s.logsumexp(-1, keepdim=True) if step % 2 == 0 else _columns_to(s, log_count)
        if kind.iterations is not None:
            return s.exp()
        off = (s.exp().sum(-1, keepdim=True) - 1).abs().amax((-2, -1), keepdim=True)
        return torch.where(off < 1e-13, s.exp(), torch.nan)
    return s.softmax(-1)


def _columns_to(s: Tensor, log_count: Tensor) -> Tensor:
    """Weights whose columns, every row as often as its cluster counts, sum to the number of tokens in theirs."""
    return s - (s + log_count.mT).logsumexp(-2, keepdim=True) + log_count


def _chosen(s: Tensor, count: Tensor, top: int) -> Tensor:
    """Equal weights on the tokens of the best clusters until there are `top` of them."""
    s = s.detach()
    order = s.argsort(-1, descending=True)
    before = count.expand(s.shape).gather(-1, order).cumsum(-1) - count.expand(s.shape).gather(-1, order)
    last = torch.where(before < top, s.gather(-1, order), torch.inf).amin(-1, keepdim=True)
    slack = 1e-12 * s.abs().amax(-1, keepdim=True)
    chosen = torch.where(s >= last - slack, count.expand(s.shape), 0.0)
    return chosen / chosen.sum(-1, keepdim=True)


def configurations(attn: Attention, n: int, radius: float) -> list[tuple[Points, Counts]]:
    """Clusters of one, two and three, by how many: (batch, points, d) and how many tokens are at each."""
    length = radius * (1 - 1e-12)
    units = _directions(attn)
    units = length * torch.cat([units, -units])
    made: list[tuple[Points, Counts]] = [(units[:, None], units.new_full((len(units), 1), float(n)))]
    if n >= 2:
        top = attn.kind.top if isinstance(attn.kind, Hard) else 1
        few = sorted(k for k in {1, 2, top, n // 8, n // 2} if 1 <= k < n)
        zero, half = torch.zeros_like(units), units / 2
        # a direction beside the next: right and left singular vectors follow each other
        pairs = torch.cat([torch.stack(p, 1) for p in ((units, -units), (units, zero), (zero, units), (half, units))])
        pairs = torch.cat([pairs, torch.stack([units, units.roll(-1, 0)], 1), torch.stack([units, -units.roll(-1, 0)], 1)])
        points = pairs.repeat(len(few), 1, 1)
        counts = torch.cat([units.new_tensor([[n - k, k]]).expand(len(pairs), 2) for k in few])
        made.append((points, counts.to(units)))
    if n >= 3:
        left = (n - 1) // 2
        near = torch.cat([f * units for f in _fractions(attn, n, length)])
        triples = torch.stack([torch.zeros_like(near), near, -near], 1)
        made.append((triples, units.new_tensor([[1.0, n - 1 - left, left]]).expand(len(triples), 3)))
    return made


def _fractions(attn: Attention, n: int, length: float) -> list[float]:
    """Shares of the radius at which one token between two clusters is tried: all of it, and where distances count most."""
    if not isinstance(attn.kind, L2) or length == 0:
        return [1.0, 0.5]
    spread = float(torch.linalg.matrix_norm(attn.by_head().q, ord=2).max()) * length * math.sqrt(abs(attn.scale))
    best = math.sqrt(1 + math.log(n))
    return [1.0, 0.5] + [f * best / spread for f in (0.7, 0.85, 1.0, 1.15) if f * best < spread]


def _directions(attn: Attention) -> Float[Tensor, "k d"]:
    """Unit vectors that the weights of the first heads single out."""
    w, found = attn.by_head(), []
    for h in range(min(attn.heads, _HEADS)):
        q, k = (t[h] / t[h].abs().max().clamp_min(1e-300) for t in (w.q, w.k))
        left, _, right = torch.linalg.svd(k.mT @ q, full_matrices=False)
        found += [right[0], left[:, 0]]
        sym = (k.mT @ q + q.mT @ k) / 2
        vectors = torch.linalg.eigh(sym)[1]
        found += [vectors[:, -1], vectors[:, 0]]
        value = w.o[h] / w.o[h].abs().max().clamp_min(1e-300) @ w.v[h]
        found += [torch.linalg.svd(t, full_matrices=False)[2][0] for t in (q, k, value)]
    units = torch.stack(found)
    units = units[units.isfinite().all(-1)]
    return units / units.norm(dim=-1, keepdim=True).clamp_min(1e-300)


