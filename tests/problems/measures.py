"""Random measures, and maps of every kind that acts on them."""

import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.maps import Map
from problems.layers import gaussian

KINDS = ["plain", "causal", "grouped", "softcap", "layer norm", "rms norm", "two layers"]


def layer(seed: int, d: int = 3, heads: int = 1, kv_heads: int | None = None, gain: float = 1.5, **options) -> hs.Attention:
    """A random layer with biases, d → d."""
    kv = kv_heads or heads
    return hs.Attention(
        gain * gaussian(heads * 2, d, seed=seed),
        gaussian(kv * 2, d, seed=seed + 1),
        gaussian(kv * 2, d, seed=seed + 2),
        gaussian(d, heads * 2, seed=seed + 3),
        heads,
        kv,
        b_q=gaussian(heads * 2, seed=seed + 4),
        b_k=gaussian(kv * 2, seed=seed + 5),
        b_v=gaussian(kv * 2, seed=seed + 6),
        b_o=gaussian(d, seed=seed + 7),
        **options,
    )


def make(kind: str, seed: int, d: int = 3) -> Map:
    """A map of that kind."""
    if kind == "causal":
        return layer(seed, d, causal=True)
    if kind == "grouped":
        return layer(seed, d, heads=4, kv_heads=2)
    if kind == "softcap":
        return layer(seed, d, softcap=1.5)
    if kind == "layer norm":
        return layer(seed, d, heads=2) @ hs.LayerNorm(1 + 0.3 * gaussian(d, seed=seed + 8), gaussian(d, seed=seed + 9), eps=0.1)
    if kind == "rms norm":
        return layer(seed, d, causal=True) @ hs.RMSNorm(1 + 0.3 * gaussian(d, seed=seed + 8))
    if kind == "two layers":
        return layer(seed + 10, d, gain=0.7) @ hs.RMSNorm(torch.ones(d).double()) @ layer(seed, d)
    assert kind == "plain"
    return layer(seed, d)


def random_measure(m: int, seed: int, d: int = 3, ties: bool = True) -> hs.Measure:
    """Distinct atoms of unequal mass, at positions that may tie."""
    random = torch.Generator().manual_seed(seed)
    positions = torch.rand(m, generator=random, dtype=torch.float64)
    return hs.Measure(
        gaussian(m, d, seed=seed),
        torch.softmax(gaussian(m, seed=seed + 50), 0),
        positions.mul(3).ceil().div(3) if ties else positions,
    )


def weighted_jacobian(f: Map, mu: hs.Measure) -> Tensor:
    """`D^½ J D^{−½}` by autodiff of the plain reference, (m·d_out, m·d)."""
    on = f.on(mu)
    jacobian = torch.func.jacrev(lambda x: on.value(x[None])[0])(mu.points.double())
    assert isinstance(jacobian, Tensor)
    root = mu.mass.sqrt()
    jacobian = jacobian * root[:, None, None, None] / root[:, None]
    return jacobian.flatten(0, 1).flatten(1)


def norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


class Bare(Map):
    """A map of width 3 that does nothing but be one."""

    @property
    def width(self) -> int:
        return 3

    @property
    def out_width(self) -> int:
        return 3

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    def moved(self, device, dtype):
        return self

    def value(self, x):
        raise NotImplementedError

    def linearize(self, x):
        raise NotImplementedError
