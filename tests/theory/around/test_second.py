"""Second derivatives of a layer and what is beyond them: right, sound, and tight where they claim to be."""

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.maps import Attention, LayerNorm, RMSNorm, Rotary
from howsmooth.study import alice
from howsmooth.theory.around import AroundAttention, Neighbourhood
from howsmooth.theory.around.along import Second, flattened, least_share
from howsmooth.theory.around.attention import SECOND
from howsmooth.theory.around.covariances import Spread, beyond
from howsmooth.theory.around.jets import Centre, parts
from marks import first

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
KINDS = {
    "plain": {},
    "causal": {"causal": True},
    "rotary": {"rotary": Rotary.from_base(2, 5)},
    "padding": {"attention_mask": torch.tensor([[True, True, True, True, False]])},
    "soft-cap": {"softcap": 2.0},
    "norms": {
        "q_norm": RMSNorm(torch.ones(2).double(), eps=0.1),
        "k_norm": LayerNorm(torch.ones(2).double(), eps=0.1),
    },
}
AFFINE = ["plain", "causal", "rotary", "padding"]


def random_layer(seed: int = 0, d: int = 4, heads: int = 2, **options) -> Attention:
    g = torch.Generator().manual_seed(seed)
    weights = [torch.randn(d, d, generator=g, dtype=torch.float64) for _ in range(4)]
    return Attention(*weights, heads=heads, **options)


def jacobian(layer: Attention, x: Tensor) -> Tensor:
    return layer.linearize(x[None])[1].dense()[0]


def derivative(layer: Attention, x: Tensor, h: Tensor, eps: float = 1e-5) -> Tensor:
    """`D_X (D_X f)[h]`, by differences."""
    return (jacobian(layer, x + eps * h) - jacobian(layer, x - eps * h)) / (2 * eps)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_fit_differences(kind: str):
    layer = random_layer(4, **KINDS[kind])
    g = torch.Generator().manual_seed(3)
    u, v, h = (torch.randn(5, 4, generator=g, dtype=torch.float64) for _ in range(3))
    second = Second(Centre.of(layer, X))
    change = (derivative(layer, X, h) @ v.flatten()).reshape(5, 4)
    along = second.along(second.probes(h[None]), second.probes(v[None]))[0]
    assert torch.allclose(along, change, rtol=1e-6, atol=1e-7)
    gradient = second.gradient(u, second.probes(v[None]))[0]
    assert float((gradient * h).sum()) == pytest.approx(float((u * change).sum()), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("probes", [8, 64])
def test_all_second_derivatives_at_once(kind: str, probes: int):
    """Theorem 6.12, with Gaussian directions and with a basis, against `sup_u ‖T(·, u, ·)‖_F` from every entry of `D²f`."""
    layer = random_layer(4, **KINDS[kind])
    second = Second(Centre.of(layer, X))
    whole = torch.stack([derivative(layer, X, h.reshape(5, 4)) for h in torch.eye(20, dtype=torch.float64)])  # (h, out, in)
    most = float(torch.linalg.matrix_norm(whole.transpose(0, 1).flatten(1), 2))
    steepest = max(float(torch.linalg.matrix_norm(torch.einsum("h,hoi->oi", h, whole), 2)) for h in torch.eye(20).double())
    bound = flattened(second, torch.arange(5), probes, 1e-6, 0)
    assert steepest <= most <= bound * (1 + 1e-6)
    assert bound <= (1.2 if probes >= 20 else 1.6 / math.sqrt(least_share(probes, 5e-7))) * most


def test_gaussian_directions_miss_as_rarely_as_they_say():
    """Theorem 6.12: the mean of `m` squares falls below `t` no more often than `(t e^{1−t})^{m/2}`, one direction the worst."""
    g, m, delta = torch.Generator().manual_seed(0), 4, 0.05
    t = least_share(m, delta)
    assert (t * math.exp(1 - t)) ** (m / 2) <= delta < (1.05 * t * math.exp(1 - 1.05 * t)) ** (m / 2)
    for spectrum in (torch.tensor([1.0]), torch.tensor([0.5, 0.5]), torch.full((9,), 1 / 9)):
        squares = (torch.randn(20_000, m, len(spectrum), generator=g).square() * spectrum).sum(-1).mean(-1)
        assert float((squares <= t).double().mean()) <= delta


@pytest.mark.parametrize("kind", AFFINE)
@pytest.mark.parametrize("r", [1e-4, 0.02, 0.3])
def test_the_parts_stay_within_what_is_beyond_first_order(kind: str, r: float):
    """Theorem 6.13, against the Jacobian at random places less its expansion."""
    layer, g = random_layer(5, heads=1, **({} if kind == "rotary" else KINDS[kind])), torch.Generator().manual_seed(0)
    if kind == "rotary":
        layer = random_layer(5, heads=1, rotary=Rotary.from_base(4, 5))
    centre = Centre.of(layer, X)
    radii = torch.full((5,), r, dtype=torch.float64)
    rest = beyond(Spread(centre, parts(centre, radii), radii, torch.arange(5)))
    most = float(centre.geometry.nu) * float(rest.weights) + float(rest.query.amax()) + float(rest.key)
    ratios = []
    for _ in range(20):
        h = torch.randn(5, 4, generator=g, dtype=torch.float64)
        h = r * h / h.norm(dim=-1, keepdim=True)
        left = jacobian(layer, X + h) - jacobian(layer, X) - derivative(layer, X, h)
        ratios.append(float(torch.linalg.matrix_norm(left, 2)) / most)
    assert max(ratios) <= 1 + (1e-2 if r < 1e-3 else 1e-6)
    assert max(ratios) > 1e-4 or r > 0.02


def test_what_is_beyond_first_order_is_of_second_order():
    centre = Centre.of(random_layer(5), X)
    sizes = []
    for r in (1e-4, 1e-5):
        radii = torch.full((5,), r, dtype=torch.float64)
        sizes.append(beyond(Spread(centre, parts(centre, radii), radii, torch.arange(5))))
    for near, far in zip(sizes[1], sizes[0], strict=True):
        assert bool((far.value > 90 * near.value).all())
        assert bool((far.value < 110 * near.value).all())


@pytest.mark.parametrize("kind", ["soft-cap", "norms"])
def test_layers_out_of_reach_have_the_other_bounds(kind: str):
    around = AroundAttention(random_layer(5, **KINDS[kind]), X)
    assert around.by_derivatives(Neighbourhood.of(X, 0.01)) == (math.inf, math.inf)
    assert math.isfinite(around.within(Neighbourhood.of(X, 0.01)).slope)
    moving = AroundAttention(random_layer(5), X, tokens=(1, 2))
    assert moving.by_derivatives(Neighbourhood.of(X, 0.01)) == (math.inf, math.inf)
    assert max(moving.by_derivatives(Neighbourhood.of(X, 0.01, tokens=[1]))) < math.inf


def test_confidence_counts_every_certificate():
    layer, around = random_layer(5), AroundAttention(random_layer(5), X, delta=1e-3)
    assert around.within(Neighbourhood.of(X, 1e-7)).confidence == 1 - 1e-3
    found = around.within(Neighbourhood.of(X, 0.02))
    assert (found.reason, found.confidence) == (SECOND, 1 - 1.5e-3)
    near = hs.lipschitz(layer, X, within=0.02, steps=1)
    assert (near.around, near.confidence) == (SECOND, 1 - 1.5e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "most"), first([(2, (1.25, 1.6, 3.6)), (4, (1.25, 1.6, 3.6))]))
def test_the_demo_model_around_a_text(layer: int, most: tuple[float, ...]):
    """The figures of docs/explanation/around.md: 32 tokens, r = 1e-3, 2e-3 and 5e-3 of their mean length."""
    capture = hs.load("demo", device="cpu").capture(text=alice()[2000:6000], n=32)
    attn, x = capture.attention(layer), capture.tokens(layer).double()
    bounds, size = AroundAttention(attn, x), float(x.norm(dim=-1).mean())
    near = bounds.within(Neighbourhood.of(x, 1e-4 * size))
    attained = hs.lipschitz(attn, x, within=1e-4 * size, steps=0, tol=1e-7).lower
    at = hs.lipschitz(attn, x, tol=1e-7).lower
    assert 0 < attained - at <= near.slope - at < 5 * (attained - at)
    for share, limit in zip((1e-3, 2e-3, 5e-3), most, strict=True):
        assert bounds.within(Neighbourhood.of(x, share * size)).slope <= limit * at
