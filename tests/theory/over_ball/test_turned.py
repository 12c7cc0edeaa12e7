"""Bounds of layers whose queries and keys are normalised or turned: sound over a ball and at a point, and not idle."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from howsmooth.maps import Attention, LayerNorm, RMSNorm, Rotary
from howsmooth.theory.at_point import heads
from howsmooth.theory.at_point.table import operator_bound, trace_forms, yudin_bound
from howsmooth.theory.bound import Bound
from howsmooth.theory.constants import constants
from howsmooth.theory.over_ball.table import ball_bounds
from problems.layers import LayerProblem, gaussian, turned, turned_layers

F64 = torch.float64
KINDS = [kinds for kinds in itertools.product(range(3), repeat=3) if any(kinds)]  # norms of queries, of keys, phases
KINDS += [(3, 3, 1), (4, 3, 0), (0, 4, 2), (3, 2, 1)]  # over all heads
MASKS = [{}, {"causal": True}, {"softcap": 0.8, "causal": True}, {"window": 3}]
OURS = ("B7", "B8", "B8m", "B9", "B10")


def layer(seed: int, d: int = 4, heads: int = 2, head: int = 4, gain: float = 1.0, **options) -> Attention:
    kv, d_v = min(heads, 1 + seed % 2), 2
    return Attention(
        gain * gaussian(heads * head, d, seed=seed),
        gain * gaussian(kv * head, d, seed=seed + 1),
        gaussian(kv * d_v, d, seed=seed + 2),
        gaussian(3, heads * d_v, seed=seed + 3),
        heads=heads,
        kv_heads=kv,
        b_q=gaussian(heads * head, seed=seed + 4) if seed % 3 else None,
        b_k=gaussian(kv * head, seed=seed + 5) if seed % 3 else None,
        **options,
    )


def measured(attn: Attention, x: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(attn.linearize(x)[1].dense(), 2)


def sequences(n: int, d: int, radius: float, count: int, seed: int) -> Tensor:
    """Tokens in the ball: on the sphere, two clusters, near zero where norms are steepest, of every size."""
    noise = gaussian(count, n, d, seed=seed)
    sphere = radius * noise / noise.norm(dim=-1, keepdim=True)
    pairs = sphere[:, torch.arange(n) % 2]
    few = torch.cat([-sphere[:, :1], sphere[:, 1:2].expand(-1, n - 1, -1)], 1)
    tiny = sphere * torch.logspace(-7, 0, count, dtype=F64)[:, None, None]
    mixed = sphere * 10 ** (-4 * torch.rand(count, n, 1, generator=torch.Generator().manual_seed(seed), dtype=F64))
    one_zero = torch.cat([torch.zeros_like(sphere[:, :1]), sphere[:, 1:]], 1)
    return torch.cat([sphere, pairs, few, tiny, mixed, one_zero, torch.zeros_like(sphere[:1])])


def refuted(bounds: list[Bound], best: float) -> list[str]:
    """Upper bounds that a measured L lies above."""
    upper = [(b.id, b.value) for b in bounds if b.side == "upper" and b.value is not None]
    return [f"{id}: {value} < {best}" for id, value in upper if value < best * (1 - 1e-9)]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_sound_over_the_ball(kinds):
    """About 10 000 sequences altogether."""
    for i, options in enumerate(MASKS):
        seed = 7 * KINDS.index(kinds) + i
        n, radius = ((5, 1.0), (8, 0.4), (3, 2.5))[seed % 3]
        attn = turned(layer(seed, gain=(1.0, 0.2)[i % 2], **options), n, q=kinds[0], k=kinds[1], phases=kinds[2], seed=seed)
        best = float(measured(attn, sequences(n, 4, radius, 16, seed)).max())
        found = ball_bounds(attn, n, radius)
        assert refuted(found, best) == []
        assert {b.id for b in found if b.applies} >= {"B7", "B9" if attn.causal else "B8"}
        assert {b.id for b in found if b.applies} <= set(OURS)


@pytest.mark.parametrize("kinds", [(0, 0, 1), (2, 1, 2), (3, 4, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_gradient_ascent(kinds, causal):
    """L climbed by its own gradient stays below."""
    n, d, radius = 4, 2, 1.0
    attn = turned(layer(3, d=d, causal=causal), n, q=kinds[0], k=kinds[1], phases=kinds[2], seed=4)
    x = (radius * gaussian(4, n, d, seed=1)).requires_grad_()
    steps = torch.optim.Adam([x], lr=0.05)
    best = 0.0
    for _ in range(15):
        tokens = x * (radius / x.norm(dim=-1, keepdim=True).clamp_min(radius))
        J = torch.func.vmap(torch.func.jacrev(attn))(tokens).reshape(4, -1, n * d)
        L = torch.linalg.matrix_norm(J, 2)
        best = max(best, float(L.detach().max()))
        steps.zero_grad()
        L.log().sum().neg().backward()
        steps.step()
    assert refuted(ball_bounds(attn, n, radius), best) == []


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_sound_at_a_point(kinds):
    for i, options in enumerate(MASKS):
        seed = 5 * KINDS.index(kinds) + i
        n = (1, 4, 7)[seed % 3]
        plain = layer(seed, heads=1 + seed % 2, gain=(1.0, 3.0)[i % 2], **options)
        attn = turned(plain, n, q=kinds[0], k=kinds[1], phases=kinds[2], seed=seed)
        x = sequences(n, 4, 1.5, 3, seed) if n > 1 else gaussian(6, 1, 4, seed=seed)
        truth = measured(attn, x)
        for bound in trace_forms(attn.linearize(x)[1]):
            assert bool((bound * (1 + 1e-9) >= truth).all()), float((bound / truth).min())


@pytest.mark.slow
@settings(max_examples=25)
@given(turned_layers())
def test_sound_on_any_layer(case: LayerProblem):
    truth = measured(case.layer, case.x)
    for bound in trace_forms(case.layer.linearize(case.x)[1]):
        assert bool((bound * (1 + 1e-9) >= truth).all())
    radius = float(case.x.norm(dim=-1).max())
    assert refuted(ball_bounds(case.layer, case.x.shape[1], radius), float(truth.max())) == []


def test_sound_in_single_precision():
    for i, kinds in enumerate(KINDS[::3]):
        attn = turned(layer(i), 5, q=kinds[0], k=kinds[1], phases=kinds[2], seed=2 * i).to(torch.float32)
        x = gaussian(6, 5, 4, seed=i, dtype=torch.float32)
        truth = measured(attn, x.double())
        for bound in trace_forms(attn.linearize(x)[1]):
            assert bool((bound >= truth).all())


def test_tightness_at_a_point():
    """Recorded geometric means of bound/L, one head: phases 2.4; norms and phases 3.1."""
    for kinds, limit in (((0, 0, 1), 2.8), ((1, 1, 1), 3.8)):
        logs = []
        for seed in range(6):
            attn = turned(layer(12 * seed, d=8, heads=1, gain=0.5), 10, q=kinds[0], k=kinds[1], phases=kinds[2], seed=2 * seed)
            x = gaussian(4, 10, 8, seed=seed)
            bound = operator_bound(attn.linearize(x)[1])
            assert bound is not None
            logs += (bound / measured(attn, x)).log().tolist()
        assert math.exp(sum(logs) / len(logs)) < limit, kinds


def test_phases_can_make_logits_out_of_nothing():
    """`W_kᵀ W_q = 0`, yet turned queries meet keys: the constants of plain layers would be refuted."""
    w_q, w_k = torch.zeros(2, 2, dtype=F64), torch.zeros(2, 2, dtype=F64)
    w_q[0, 0], w_k[1, 0] = 3.0, 3.0
    plain = Attention(w_q, w_k, torch.eye(2, dtype=F64))
    attn = dataclasses.replace(plain, rotary=Rotary.from_base(2, 8))
    best = float(measured(attn, sequences(8, 2, 2.0, 32, 0)).max())
    assert refuted(ball_bounds(plain, 8, 2.0), best)
    assert refuted(ball_bounds(attn, 8, 2.0), best) == []


def test_norms_are_steep_where_queries_vanish():
    """Keys `α x/√eps` near zero: the slope `1/√eps` is needed, and attained up to a small factor."""
    eye, eps = torch.eye(2, dtype=F64), 1e-4
    attn = Attention(eye, eye, eye, scale=1.0, q_norm=RMSNorm(torch.ones(2, dtype=F64), eps=eps))
    x = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]], dtype=F64)
    best = float(measured(attn, x))
    assert refuted(ball_bounds(dataclasses.replace(attn, q_norm=None), 3, 1.0), best)
    found = {b.id: b for b in ball_bounds(attn, 3, 1.0)}
    value = found["B7"].value
    assert value is not None
    assert best > 0.5 / eps**0.5
    assert best <= value <= 10 * best
    steep = dataclasses.replace(attn, q_norm=RMSNorm(torch.ones(2, dtype=F64), eps=0.0))
    assert all("eps = 0" in str(b.reason) for b in ball_bounds(steep, 3, 1.0) if b.id in ("B7", "B8", "B8m"))
    away = dataclasses.replace(steep, b_q=torch.tensor([9.0, 0.0], dtype=F64))  # the bias keeps queries from zero
    assert {b.id for b in ball_bounds(away, 3, 1.0) if b.applies} == {"B7", "B8", "B8m"}
    assert refuted(ball_bounds(away, 3, 1.0), float(measured(away, sequences(3, 2, 1.0, 40, 1)).max())) == []


def test_norms_bound_logits_at_any_radius():
    """The column sums of B8m stop growing with the radius, as they do under a soft-cap."""
    attn = layer(0, q_norm=RMSNorm(torch.ones(4, dtype=F64)), k_norm=LayerNorm(torch.ones(4, dtype=F64)))
    near, far = ({b.id: b.log_value for b in ball_bounds(attn, 9, r)}["B8m"] for r in (1e3, 1e6))
    assert near is not None
    assert far is not None
    assert far - near < math.log(1e3) + 1e-6  # the polynomial factor alone


def test_product_of_norms_is_not_all():
    """Factors on planes: a query side that is large where the key side is small costs nothing."""
    scales = torch.tensor([100.0, 1.0, 100.0, 1.0], dtype=F64)  # planes (0, 2) and (1, 3)
    w_q, w_k = torch.eye(4, dtype=F64) * scales, torch.eye(4, dtype=F64) / scales
    rotary = Rotary.from_base(4, 6)
    assert constants(Attention(w_q, w_k, w_q, scale=1.0, rotary=rotary)).reach(0, 1.0) == pytest.approx(1.0)
    for seed in range(20):
        q, k = gaussian(4, 3, seed=seed), gaussian(4, 3, seed=seed + 100)
        bound = constants(Attention(q, k, q, scale=1.0, rotary=rotary)).reach(0, 1.0)
        angles = 6.28 * torch.rand(400, 2, dtype=F64, generator=torch.Generator().manual_seed(seed))
        free = Rotary(angles.cos(), angles.sin())
        rotated = free.turn(q.mT[:, None].expand(-1, 400, -1)).permute(1, 2, 0)  # (angles, head, d)
        seen = float(torch.linalg.matrix_norm(k.mT @ rotated, 2).max())
        product = float(torch.linalg.matrix_norm(q, 2) * torch.linalg.matrix_norm(k, 2))
        assert seen <= bound * (1 + 1e-12)
        assert bound <= product * (1 + 1e-9)
        assert bound <= 1.35 * seen


def test_tables_that_stretch():
    """Phases from rounded tables, or scaled ones, count with what they are."""
    rotary = Rotary.from_base(4, 6)
    scaled = Rotary(1.3 * rotary.cos, 1.3 * rotary.sin)
    assert scaled.gain == pytest.approx(1.3)
    attn = layer(1, rotary=scaled)
    x = sequences(6, 4, 1.0, 16, 1)
    truth = measured(attn, x)
    assert refuted(ball_bounds(attn, 6, 1.0), float(truth.max())) == []
    assert bool((trace_forms(attn.linearize(x)[1]).best >= truth).all())


@pytest.mark.parametrize(
    ("options", "word"), [({"rotary": Rotary.from_base(4, 9)}, "rotary"), ({"k_norm": RMSNorm(torch.ones(4))}, "norms")]
)
def test_published_rows_do_not_apply(options, word):
    eye = torch.eye(4, dtype=F64)
    attn = Attention(eye, None, eye, scale=1.0, **options)
    for causal in (False, True):
        rows = {b.id: b for b in ball_bounds(dataclasses.replace(attn, causal=causal), 9, 1.0)}
        for id in ("B1", "B3", *(("B9", "B13", "B14") if causal else ("B2", "B4", "B5", "B12", "B12m")), "B15", "B16"):
            assert rows[id].applies == (id == "B9")
            assert rows[id].applies or word in str(rows[id].reason), (id, rows[id].reason)
    assert word in str(yudin_bound(attn, torch.zeros(3, 4)).reason)


@pytest.mark.parametrize("lost", ["query", "key"])
def test_a_missing_slope_is_caught(lost, monkeypatch):
    """The inputs are sharp enough to notice slopes that are too small."""
    slopes = heads.token_slopes

    def too_small(*args):
        found = slopes(*args)
        assert found is not None
        return found._replace(**{lost: 0.01 * getattr(found, lost)})

    caught = {False: 0, True: 0}
    for wrong in caught:
        if wrong:
            monkeypatch.setattr(heads, "token_slopes", too_small)
        for seed in range(8):
            attn = turned(layer(3 * seed, heads=1), 5, q=1, k=1, phases=1, seed=2 * seed + 1)
            x = sequences(5, 4, 1.5, 4, seed)
            caught[wrong] += int((trace_forms(attn.linearize(x)[1]).best < measured(attn, x) * (1 - 1e-9)).sum())
    assert caught[False] == 0
    assert caught[True] > 0
