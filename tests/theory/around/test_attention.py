"""Bounds around an input: sound on hostile neighbourhoods, tight where they claim to be, each lemma by itself."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import howsmooth as hs
from howsmooth.maps import Attention, LayerNorm, RMSNorm, Rotary
from howsmooth.theory.around import AroundAttention, Neighbourhood
from howsmooth.theory.around.along import pairs_at
from howsmooth.theory.around.covariances import top
from howsmooth.theory.around.jets import Centre, Jet, _softmax, moves
from howsmooth.theory.over_ball.table import ball_bounds
from howsmooth.theory.upper import Upper, exp_rest
from marks import first
from problems.neighbourhoods import Looked, examine, near

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def random_layer(seed: int = 0, d: int = 4, heads: int = 2, **options) -> Attention:
    g = torch.Generator().manual_seed(seed)
    weights = [torch.randn(d, d, generator=g, dtype=torch.float64) for _ in range(4)]
    return Attention(*weights, heads=heads, **options)


KINDS = {
    "plain": {},
    "causal": {"causal": True},
    "rotary": {"rotary": Rotary.from_base(2, 5)},
    "soft-cap": {"softcap": 2.0},
    "norms": {
        "q_norm": RMSNorm(torch.ones(2).double(), eps=0.1),
        "k_norm": LayerNorm(torch.ones(2).double(), eps=0.1),
    },
    "norms over heads": {
        "q_norm": RMSNorm(torch.ones(4).double(), eps=0.1),
        "k_norm": RMSNorm(torch.ones(4).double(), eps=0.1),
    },
    "padding": {"attention_mask": torch.tensor([[True, True, True, True, False]])},
}


# values or tokens of 1e-150, padding before products that cancel, output weights whose squares overflow, and heads that cancel
# up to what rounding does to weights
HOSTILE = [90031, 90407, 2749, 2858, 10814, 1986]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", first([[*range(24), *HOSTILE], range(24, 75)]), ids=["first", "more"])
def test_no_point_of_a_hostile_neighbourhood_is_above_its_bounds(seeds: Sequence[int]):
    looked = Looked()
    for seed in seeds:
        examine(near(seed), looked)
    assert not looked.wrong, looked.wrong[0]
    assert looked.neighbourhoods > 0.68 * len(seeds)
    assert looked.points > 3 * looked.neighbourhoods


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_order_is_exact(kind: str):
    """To first order the bound is `σ + Σ r_i |∇_i σ|`, which ascent attains."""
    layer, r = random_layer(5, **KINDS[kind]), 1e-7
    at = hs.lipschitz(layer, X).lower
    near = hs.lipschitz(layer, X, within=r, steps=1)
    assert near.point is not None
    assert hs.lipschitz(layer, near.point).upper >= near.lower * (1 - 1e-9)
    attained, certified = near.lower / at - 1, near.upper / at - 1
    assert 0 < attained <= certified < 1.2 * attained + 1e-9


def test_nothing_moves_at_radius_zero():
    layer = random_layer()
    at, near = hs.lipschitz(layer, X), hs.lipschitz(layer, X, within=0.0)
    assert (near.lower, near.upper, near.status, near.confidence) == (at.lower, at.upper, at.status, at.confidence)
    assert near.point is not None
    assert torch.equal(near.point, X)
    around = AroundAttention(layer, X).within(Neighbourhood.of(X, 0.0))
    assert around.change == 0
    assert around.moved_total == 0
    assert at.lower <= around.slope <= at.upper * (1 + 1e-6)


def test_upper_ends_grow_with_the_radius_and_meet_the_ball():
    layer = random_layer(2)
    bounds = AroundAttention(layer, X)
    slopes = [bounds.within(Neighbourhood.of(X, r)).slope for r in (1e-4, 1e-2, 0.1, 1.0, 10.0, 1e3)]
    assert slopes == sorted(slopes)
    for r in (0.1, 10.0, 1e3):
        area = Neighbourhood.of(X, r)
        best = min(b.value for b in ball_bounds(layer, 5, area.reach) if b.side == "upper" and b.value is not None)
        assert bounds.within(area).slope <= best


def test_a_sequence_moves_less_than_its_tokens():
    layer = random_layer(2)
    bounds = AroundAttention(layer, X)
    token, sequence = (bounds.within(Neighbourhood.of(X, 1e-3, per)) for per in ("token", "sequence"))
    assert sequence.slope <= token.slope
    assert sequence.moved_total < token.moved_total


def test_frozen_tokens_do_not_move():
    layer = random_layer(2)
    near = hs.lipschitz(layer, X, within=0.01, tokens=[1, 3], steps=3)
    at = hs.lipschitz(layer, X, tokens=[1, 3])
    assert near.point is not None
    assert torch.equal(near.point[[0, 2, 4]], X[[0, 2, 4]])
    assert at.lower <= near.lower <= near.upper <= hs.lipschitz(layer, X, within=0.01, steps=0).upper
    assert float(near.direction[[0, 2, 4]].norm()) == 0


def test_a_norm_that_is_known_takes_the_place_of_pairs():
    layer, area = random_layer(2), Neighbourhood.of(X, 1e-4)
    norm = hs.lipschitz(layer, X).upper
    cheap, apart = AroundAttention(layer, area.point, norm=norm).within(area), AroundAttention(layer, area.point).within(area)
    assert apart.slope < cheap.slope <= (norm + cheap.change) * (1 + 1e-9)
    assert cheap.change == pytest.approx(apart.change)


def test_logits_beyond_the_range_say_so():
    layer = replace(random_layer(2), scale=1e6)
    around = AroundAttention(layer, X).within(Neighbourhood.of(X, 1e3))
    assert not math.isnan(around.slope)
    assert around.reason
    assert around.slope > 1e3


def test_overflow_becomes_infinity_with_a_reason():
    layer = random_layer(2)
    layer = replace(layer, w_q=1e120 * layer.w_q, w_k=1e-120 * layer.w_q, softcap=3.0)
    around = AroundAttention(layer, X).within(Neighbourhood.of(X, 1e100))
    assert around.slope == math.inf or around.slope > 1e50
    assert around.reason


def test_estimate_of_a_neighbourhood_says_what_it_is():
    near = hs.lipschitz(random_layer(2), X, within=1e-3, steps=2)
    assert "attained at point" in near.note
    assert "upper end" in near.note
    plain = near.to_dict()
    assert "point" not in plain
    assert plain["around"] == near.around


def test_lipschitz_takes_tokens_that_may_move():
    layer = random_layer(2)
    part = hs.lipschitz(layer, X, tokens=[2]).value
    J = layer.linearize(X[None])[1].dense()[0]
    assert part == pytest.approx(float(torch.linalg.matrix_norm(J[:, 8:12], 2)))


def test_pairs_bound_the_norm_at_the_centre():
    g = torch.Generator().manual_seed(0)
    layer = Attention(*(torch.randn(24, 24, generator=g).double() / 5 for _ in range(4)), heads=3)
    x = torch.randn(16, 24, generator=g).double()  # more than is decomposed outright
    operator = layer.linearize(x[None])[1]
    truth = torch.linalg.svdvals(operator.dense()[0])
    pairs = pairs_at(operator, None, 4, 1e-6, 0)
    assert float(truth[0]) <= pairs.norm <= 1.001 * float(truth[0])
    assert float(truth[4]) <= pairs.others * (1 + 1e-9)


def test_weights_stay_in_their_range():
    """Lemma 6.2: every corner of a box of logits, against the range and the rest of the expansion."""
    g = torch.Generator().manual_seed(0)
    layer = random_layer(heads=1)
    centre = Centre.of(layer, X)
    for size in (1e-3, 0.1, 2.0):
        e = size * torch.rand(1, 5, 5, generator=g, dtype=torch.float64)
        jet = _softmax(centre, Jet(Upper(e), Upper(e), Upper(torch.zeros_like(e))))
        change, rest = jet.change.value, jet.rest.value
        for _ in range(200):
            step = e * torch.sign(torch.randn(1, 5, 5, generator=g, dtype=torch.float64))
            moved = torch.softmax(centre.weights.log() + step, -1)
            linear = centre.weights * (step - (centre.weights * step).sum(-1, keepdim=True))
            assert bool((moved - centre.weights <= change + 1e-15).all())
            assert bool(((moved - centre.weights).abs() <= change + 1e-15).all())
            assert bool(((moved - centre.weights - linear).abs() <= rest + 1e-15).all())


def test_the_remainder_of_the_exponential():
    t = torch.tensor([0.0, 1e-8, 1e-4, 9e-4, 1e-3, 0.1, 5.0], dtype=torch.float64)
    exact = t.square() * sum(t**k / float(math.factorial(k + 2)) for k in range(30))
    assert bool((exp_rest(Upper(t)).value >= exact * (1 - 1e-12)).all())
    assert bool((exp_rest(Upper(t)).value <= exact * 1.01).all())


def test_norms_bend_and_twist_no_more_than_they_may():
    """Lemma 6.3, by third differences along random lines, and attained within a tenth."""
    g = torch.Generator().manual_seed(0)
    norm = RMSNorm(torch.ones(3).double(), eps=0.05)
    eye = torch.eye(3).double()
    layer = Attention(eye, eye, eye, heads=1, q_norm=norm, k_norm=norm)
    most = [0.0, 0.0]
    for _ in range(150):
        x = torch.randn(1, 3, generator=g, dtype=torch.float64) * 10 ** float(torch.rand(1, generator=g) * 2 - 1)
        query, _ = moves(Centre.of(layer, x), torch.zeros(1).double())
        a = torch.randn(1, 3, generator=g, dtype=torch.float64)
        a, step = a / a.norm(), 1e-3 * float(x.norm())
        f = [norm.value(x + k * step * a) for k in (-2, -1, 0, 1, 2)]
        bend = float((f[1] - 2 * f[2] + f[3]).norm()) / step**2
        twist = float((f[4] - 2 * f[3] + 2 * f[1] - f[0]).norm()) / (2 * step**3)
        most = [max(most[0], bend / float(query.bend)), max(most[1], twist / float(query.twist))]
    assert 0.9 < most[0] < 1.001
    assert 0.6 < most[1] < 1.001


def test_powers_bound_the_top_of_a_covariance():
    g = torch.Generator().manual_seed(0)
    w = torch.rand(2, 5, 7, generator=g, dtype=torch.float64)
    y, c = torch.randn(2, 7, 6, generator=g).double() + 100, torch.randn(2, 5, 6, generator=g).double() + 100
    d = y[:, None] - c[:, :, None]
    truth = torch.linalg.eigvalsh(torch.einsum("hij,hija,hijb->hiab", w, d, d))[..., -1].sqrt()
    found = top(w, y, c).value
    assert bool((found >= truth * (1 - 1e-12)).all())
    assert bool((found <= 1.06 * truth).all())
