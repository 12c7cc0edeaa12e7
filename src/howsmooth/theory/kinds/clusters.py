"""What a few clusters of equal tokens attain, for every kind of attention: lower bounds over the ball (8.10).

All tokens of a cluster move together. That leaves a map of a few points, the number of tokens of each in its weights, whose
derivative is no larger than that of all tokens. Numbers such as 8.10 are those of docs/explanation/kinds.md.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.maps import Attention, AutodiffJacobian
from howsmooth.maps.atoms import counted
from howsmooth.spectral import Weighted, eigh, spectral_norm, svd
from howsmooth.theory.bound import Bound, at_least
from howsmooth.theory.constants import Constants
from howsmooth.theory.kinds.published import inverse_phi
from howsmooth.theory.kinds.slopes import KINDS_SOURCE
from howsmooth.theory.needs import unmet
from howsmooth.theory.upper import TINY

_HEADS = 2  # whose directions are tried
_DENSE = 128  # entries of a few points up to which the derivative is formed
_STEPS = 8  # of power iteration past that
_FEW = 24  # configurations of each number of clusters that are tried past that
_FAR = 1e100  # radius past which nothing is tried
_LARGEST = 1e6  # logits past which float64 says too little of their weights

Points = Float[Tensor, "batch points d"]
Counts = Float[Tensor, "batch points"]


@torch.no_grad()
def clusters(layer: Constants, n: int, radius: float) -> Bound:
    """C1: the best of some configurations of one, two or three clusters."""
    attn = layer.attn
    reason = unmet(attn, "not causal", "no window", "no logit bias", "no padding", "no phases")
    value = 0.0 if reason is not None else best_clusters(attn, n, radius)[0]
    answer = reason or (math.log(value) - 1e-9 if value > 0 else -math.inf)  # less what rounding explains
    statement = (
        "Lip ≥ L at clusters: all tokens equal; two clusters; one token between two; at the singular vectors of the weights"
    )
    return at_least("C1", "clusters", statement, f"{KINDS_SOURCE} 8.10", "no mask, no logit bias, no rotary phases", answer)


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
    """A lower bound on the constant of moving clusters as wholes; zero where logits are too large to say."""
    values, fine = points.new_zeros(len(points)), _fine(attn, points)
    if not bool(fine.any()):
        return values
    where = torch.nonzero(fine)[:, 0]
    dense = points[0].numel() <= _DENSE
    where = where if dense else where[:: 1 + len(where) // _FEW]
    points, counts = points[where], counts[where]
    root = counts.sqrt()[..., None]
    # configurations are apart by construction, so as one input they need no check of it
    jacobian = AutodiffJacobian(lambda y: counted(attn, y, counts), points, batched=dense, checked=False)
    if dense:
        J = Weighted(jacobian, root, 1 / root).dense()
        values[where] = torch.where(J.isfinite().all(-1).all(-1), spectral_norm(J), 0.0)
        return values
    v = torch.randn(points.shape, generator=torch.Generator().manual_seed(0)).to(points)
    size = points.new_zeros(len(points))
    for _ in range(_STEPS):
        v = v / v.flatten(1).norm(dim=-1).clamp_min(TINY)[:, None, None]
        image = jacobian.jvp((v / root)[None, None])[0, 0] * root
        size, v = image.flatten(1).norm(dim=-1), jacobian.vjp((image * root)[None, None])[0, 0] / root
    values[where] = torch.where(size.isfinite(), size, 0.0)
    return values


def _fine(attn: Attention, points: Points) -> Bool[Tensor, " batch"]:
    """Whether logits are of a size at which float64 still knows their weights."""
    q, k, _ = attn.vectors(points)
    longest = (q.norm(dim=-1).amax((-2, -1)) + k.norm(dim=-1).amax((-2, -1))).square()
    return abs(attn.scale) * longest < _LARGEST


def configurations(attn: Attention, n: int, radius: float) -> list[tuple[Points, Counts]]:
    """Clusters of one, two and three, by how many: (batch, points, d) and how many tokens are at each."""
    length = radius * (1 - 1e-12)
    units = _directions(attn)
    units = length * torch.cat([units, -units])
    alone = torch.cat([units, _steepest(attn, n, length)])
    tried: list[tuple[Points, Counts]] = [(alone[:, None], alone.new_full((len(alone), 1), float(n)))]
    if n >= 2:
        top = attn.kind.traits.top or 1
        few = sorted(k for k in {1, 2, top, n // 8, n // 2} if 1 <= k < n)
        zero, half = torch.zeros_like(units), units / 2
        # a direction beside the next: right and left singular vectors follow each other
        pairs = torch.cat([torch.stack(p, 1) for p in ((units, -units), (units, zero), (zero, units), (half, units))])
        pairs = torch.cat([pairs, torch.stack([units, units.roll(-1, 0)], 1), torch.stack([units, -units.roll(-1, 0)], 1)])
        points = pairs.repeat(len(few), 1, 1)
        counts = torch.cat([units.new_tensor([[n - k, k]]).expand(len(pairs), 2) for k in few])
        tried.append((points, counts.to(units)))
    if n >= 3:
        left = (n - 1) // 2
        near = torch.cat([f * units for f in _fractions(attn, n, length)])
        triples = torch.stack([torch.zeros_like(near), near, -near], 1)
        tried.append((triples, units.new_tensor([[1.0, n - 1 - left, left]]).expand(len(triples), 3)))
    return tried


def _fractions(attn: Attention, n: int, length: float) -> list[float]:
    """Shares of the radius at which one token between two clusters is tried: all of it, and where distances count most."""
    if attn.kind.traits.distances is None or length == 0:
        return [1.0, 0.5]
    spread = float(spectral_norm(attn.by_head().q).max()) * length * math.sqrt(abs(attn.scale))
    best = math.sqrt(1 + inverse_phi(n - 1))  # Proposition 8.4.2
    return [1.0, 0.5] + ([best / spread] if best < spread else [])


def _steepest(attn: Attention, n: int, length: float) -> Float[Tensor, "k d"]:
    """Of sigmoid attention: where equal tokens have weights of one half, so that slopes are largest, as far out as can be."""
    w, found, logistic = attn.by_head(), [torch.empty(0, attn.width, dtype=torch.float64)], attn.kind.traits.logistic
    if logistic is None or length == 0:
        return found[0]
    wanted = -logistic.shift(n) / length / length
    for h in range(min(attn.heads, _HEADS)):
        a = attn.scale * w.k[h].mT @ w.q[h]
        values, vectors = eigh((a + a.mT) / 2)
        low, high = float(values[0]), float(values[-1])
        if low <= wanted <= high and low < high:
            share = (wanted - low) / (high - low)
            found.append(length * (math.sqrt(share) * vectors[:, -1] + math.sqrt(1 - share) * vectors[:, 0])[None])
        elif 0 < wanted < high:
            found.append(length * math.sqrt(wanted / high) * vectors[None, :, -1])
    return torch.cat(found)


def _directions(attn: Attention) -> Float[Tensor, "k d"]:
    """Unit vectors that the weights of the first heads single out."""
    w, found = attn.by_head(), []
    for h in range(min(attn.heads, _HEADS)):
        q, k = (t[h] / t[h].abs().max().clamp_min(1e-300) for t in (w.q, w.k))
        left, _, right = svd(k.mT @ q)
        found += [right[0], left[:, 0]]
        sym = (k.mT @ q + q.mT @ k) / 2
        vectors = eigh(sym)[1]
        found += [vectors[:, -1], vectors[:, 0]]
        value = w.o[h] / w.o[h].abs().max().clamp_min(1e-300) @ w.v[h]
        found += [svd(t)[2][0] for t in (q, k, value)]
    units = torch.stack(found)
    units = units[units.isfinite().all(-1)]
    return units / units.norm(dim=-1, keepdim=True).clamp_min(1e-300)
