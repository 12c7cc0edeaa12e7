"""The bounds over the ball: refusals, reasons, tightness, and the constants behind them."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention, LayerNorm, RMSNorm
from howsmooth.measures.measure import Measure
from howsmooth.theory.bound import Bound
from howsmooth.theory.constants import constants
from howsmooth.theory.kinds import published
from howsmooth.theory.over_ball.columns import column_exponents
from howsmooth.theory.over_ball.table import ball_bounds
from howsmooth.theory.scaled import norm_radius
from problems.layers import gaussian
from problems.measures import norm, weighted_jacobian

F64 = torch.float64


def eye(d: int = 1, size: float = 1.0) -> Tensor:
    return size * torch.eye(d, dtype=F64)


def scalar(alpha: float, causal: bool = False) -> Attention:
    return Attention.from_matrices(eye(1, alpha), eye(), causal=causal)


def rows(attn: Attention, n: int, radius: float) -> dict[str, Bound]:
    found = ball_bounds(attn, n, radius)
    assert len({b.id for b in found}) == len(found)
    return {b.id: b for b in found}


def value(bound: Bound) -> float:
    assert bound.value is not None, bound.reason
    return bound.value


def log_of(bound: Bound) -> float:
    assert bound.log_value is not None, bound.reason
    return bound.log_value


@pytest.mark.parametrize("n", [0, -1, 2.0, True, None])
def test_refuses_n(n):
    with pytest.raises(BadInputError, match="at least 1"):
        ball_bounds(scalar(1.0), n, 1.0)


@pytest.mark.parametrize("radius", [-1.0, math.nan, math.inf, None])
def test_refuses_radius(radius):
    with pytest.raises(BadInputError, match="finite radius"):
        ball_bounds(scalar(1.0), 2, radius)


def test_refuses_other_maps():
    with pytest.raises(BadInputError, match="norm_radius"):
        ball_bounds(scalar(1.0) @ LayerNorm(torch.ones(1, dtype=F64)), 2, 1.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadInputError, match="LayerNorm or RMSNorm"):
        norm_radius(scalar(1.0))  # pyright: ignore[reportArgumentType]


def test_order_is_fixed():
    layers = (scalar(1.0), scalar(-1.0, causal=True), Attention.from_matrices(torch.zeros(2, 3, 3), torch.zeros(2, 3, 3)))
    orders = {tuple(b.id for b in ball_bounds(attn, n, 1.0)) for attn in layers for n in (1, 10**9)}
    assert len(orders) == 1


def test_mean_field_rows_do_not_depend_on_n():
    for causal in (False, True):
        few, many = rows(scalar(-1.0, causal), 3, 1.5), rows(scalar(-1.0, causal), 10**9, 1.5)
        assert {i for i, b in few.items() if b.mean_field} == {"B4", "B5", "B8m", "B10", "B12m", "B14", "B16"}
        assert all(few[i] == many[i] for i, b in few.items() if b.mean_field)


@pytest.mark.slow
def test_every_row_has_a_number_or_a_reason():
    w = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    layers = [
        scalar(0.0),
        scalar(2.0),
        scalar(-2.0, causal=True),
        Attention(w, w, w, w, heads=2, window=3),
        Attention(w, w, w, w, heads=2, softcap=5.0, causal=True),
        Attention(w, w, w, b_q=w[0], b_k=w[1], bias=torch.zeros(1, 1, 6, 6)),
        Attention(torch.zeros(2, 2), None, torch.zeros(2, 2)),
    ]
    for attn, n, radius in itertools.product(layers, (1, 2, 6, 10**9), (0.0, 1.0, 40.0)):
        for b in ball_bounds(attn, n, radius):
            assert b.applies == (b.reason is None)
            if b.log_value is not None:
                assert not math.isnan(b.log_value)
                assert b.log_value < math.inf


def test_reasons():
    A = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=F64)
    assert rows(Attention.from_matrices(A, eye(2)), 4, 1.0)["B2"].reason == "A has no real eigenvalue"
    assert rows(Attention.from_matrices(A, eye(2)), 4, 1.0)["B15"].applies  # needs none
    assert rows(Attention.from_matrices(eye(2), eye(2, 2.0)), 4, 1.0)["B2"].reason == "proved for V = I only"
    assert "causal" in str(rows(scalar(1.0, causal=True), 4, 1.0)["B4"].reason)
    assert "heads" not in str(rows(scalar(1.0), 4, 1.0)["B1"].reason)
    two = Attention.from_matrices(torch.stack([eye(2)] * 2), torch.stack([eye(2)] * 2))
    assert "has 2" in str(rows(two, 4, 1.0)["B1"].reason)
    assert rows(two, 4, 1.0)["B3"].applies
    assert "soft-cap" in str(rows(Attention(eye(), None, eye(), softcap=1.0), 4, 1.0)["B12"].reason)
    assert "query bias" in str(rows(Attention(eye(), None, eye(), b_q=torch.ones(1)), 4, 1.0)["B1"].reason)
    assert "window" in str(rows(Attention(eye(), None, eye(), window=2), 4, 1.0)["B12"].reason)


def test_key_and_value_biases_change_nothing_without_a_soft_cap():
    w = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    bare, biased = Attention(w, w, w), Attention(w, w, w, b_k=w[0], b_v=w[1])
    assert ball_bounds(bare, 9, 1.3) == ball_bounds(biased, 9, 1.3)
    capped = [b.log_value for b in ball_bounds(Attention(w, w, w, b_k=w[0], softcap=2.0), 9, 1.3)]
    assert capped != [b.log_value for b in ball_bounds(Attention(w, w, w, softcap=2.0), 9, 1.3)]


def test_several_hundred_in_the_exponent():
    for causal in (False, True):
        for b in ball_bounds(scalar(-5.0, causal), 10**9, 10.0):  # aR² = 500
            assert b.log_value is None or math.isfinite(b.log_value)
    wide = rows(scalar(-5.0), 10**9, 10.0)
    assert wide["B8m"].log_value == pytest.approx(500 + math.log(500), rel=1e-4)
    assert value(wide["B4"]) == math.inf
    assert value(wide["B12"]) < 1e9


def test_published_numbers():
    """B1, B2, B4, B5 as printed, evaluated by hand."""
    found = rows(scalar(-1.0), 10, 1.0)
    assert value(found["B1"]) == pytest.approx(math.sqrt(3 * (41 + 10)))
    assert value(found["B2"]) == pytest.approx(3 / (1 + 9 * math.exp(-2)))
    assert value(found["B4"]) == pytest.approx(4 * math.exp(2))
    assert value(found["B5"]) == pytest.approx(0.5 * math.e)
    found = rows(scalar(8.0), 10, 1.0)  # γ = 8/8
    assert value(found["B2"]) == pytest.approx(3 / (1 + 9 * math.exp(-2)))
    assert value(found["B5"]) == pytest.approx(0.5 * math.e)


def test_hardy():
    """A = 0, causal: the constant is 2, and B10 says 2."""
    assert value(rows(scalar(0.0, causal=True), 7, 1.0)["B10"]) == pytest.approx(2.0)


def tied_measures(d: int, radius: float, count: int) -> Iterator[Measure]:
    """Atoms in the ball of masses from even to geometric, at positions that tie more and more."""
    for seed in range(count):
        n, places = 3 + 5 * (seed % 5), (1, 2, 4, 50)[seed % 4]
        x = gaussian(n, d, seed=seed) * radius
        x = x * (radius / x.norm(dim=-1, keepdim=True).clamp_min(radius))
        mass = (torch.linspace(0, (0.0, 3.0, 12.0)[seed % 3], n, dtype=F64) + 0.5 * gaussian(n, seed=seed + 1)).softmax(0)
        position = torch.arange(n, dtype=F64).div(n).mul(places).floor().div(places)
        yield Measure(x, mass, position)


@pytest.mark.parametrize("size", [0.0, -1.0, 1.0, 3.0])
def test_causal_mean_field_rows_hold_with_ties_and_unequal_masses(size: float):
    """Theorems 3.8 and 3.11 for measures with several atoms at one position."""
    d, radius, worst = 2, 1.0, {"B10": 0.0, "B14": 0.0}
    attn = Attention.from_matrices(eye(d, size), eye(d), causal=True)
    found = rows(attn, 2, radius)
    for mu in tied_measures(d, radius, 60):
        L = norm(weighted_jacobian(attn, mu))
        for id in worst:
            worst[id] = max(worst[id], L / value(found[id]))
    assert max(worst.values()) <= 1 + 1e-12
    assert size != 0 or worst["B10"] > 0.75  # near Hardy's constant, so that a smaller bound would fail


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [-1.0, 1.0])
@pytest.mark.parametrize("causal", [False, True])
def test_sharper_than_the_paper(alpha: float, causal: bool):
    for square, n in itertools.product((4.0, 5.0, 7.0, 9.9, 10.0, 20.0, 300.0), (64, 1024, 10**6, 10**9)):
        found = rows(scalar(alpha, causal), n, square**0.5)
        gain = value(found["B1"]) / min(
            value(b) for b in found.values() if b.side == "upper" and b.applies and b.id[:2] != "B1"
        )
        assert gain >= (3.0 if square >= 10 else 2.5)
        assert value(found["B1"]) / value(found["B7"]) >= (3.0 if square >= 10 else 2.5)


def two_diracs(alpha: float, x: Tensor, y: Tensor, log_a: Tensor) -> Tensor:
    """L at `a δ_x + (1−a) δ_y`, d = 1, V = 1, in closed form."""
    log_odds, gap = log_a - torch.log1p(-log_a.exp()), y - x
    p = torch.sigmoid(-log_odds + alpha * (x * y - x * x))
    q = torch.sigmoid(log_odds + alpha * (x * y - y * y))
    m11 = (1 - p) * (1 - p * gap * alpha * x) + alpha * p * (1 - p) * gap**2
    m12 = p * (1 + (1 - p) * gap * alpha * x)
    m21 = q * (1 - (1 - q) * gap * alpha * y)
    m22 = (1 - q) * (1 + q * gap * alpha * y) + alpha * q * (1 - q) * gap**2
    root = (0.5 * log_odds).exp()
    return torch.linalg.matrix_norm(torch.stack([m11, m12 * root, m21 / root, m22], -1).unflatten(-1, (2, 2)), ord=2)


def attained(alpha: float) -> float:
    """The best two Diracs of the unit ball on a grid of places and masses."""
    places = torch.linspace(-1, 1, 17, dtype=F64)
    log_a = torch.linspace(-27, -0.01, 270, dtype=F64)
    x, y, a = torch.meshgrid(places, places, log_a, indexing="ij")
    return float(two_diracs(alpha, x, y, a).nan_to_num(0.0).max())


@pytest.mark.parametrize("square", [4.0, 8.0, 12.0])
def test_mean_field_bound_is_attained_up_to_a_constant(square: float):
    for alpha, factor in ((-square, 1.7), (square, 4.0)):
        best, found = attained(alpha), rows(scalar(alpha), 10**9, 1.0)
        assert best <= value(found["B12m"]) <= factor * best
        assert value(found["B16"]) <= 1.001 * best
        assert value(found["B4"]) > 200 * best


@pytest.mark.parametrize("square", [4.0, 6.0, 8.0, 10.0, 12.0])
def test_mean_field_bound_against_the_measure_that_is_reported(square: float):
    """B16 is attained by two Diracs (Proposition 3.12): the upper bound is within 1.7 of it, or 20 for A = γI."""
    for alpha, factor in ((-square, 1.7), (square, 20.0)):
        found = rows(scalar(alpha), 10**9, 1.0)
        assert value(found["B16"]) <= value(found["B12m"]) <= factor * value(found["B16"])


@pytest.mark.slow
def test_ours_beat_every_published_row():
    """Random heads, full and causal: no published bound is better than the best of ours that speaks of the same thing."""
    compared = 0
    for seed in range(24):
        r = torch.Generator().manual_seed(seed)
        d, heads = 1 + seed % 4, 1 + seed % 3
        A, V = (torch.randn(heads, d, d, generator=r, dtype=F64) for _ in range(2))
        V = eye(d).expand(heads, d, d) if seed % 2 else V
        attn = Attention.from_matrices(*((A, V) if heads > 1 else (A[0], V[0])), causal=seed % 4 > 1)
        for n, radius in ((2, 0.5), (16, 2.0), (1000, 1.0)):
            found = [b for b in ball_bounds(attn, n, radius) if b.log_value is not None]
            ours = [b for b in found if b.source.startswith("howsmooth")]
            for b in found:
                if b in ours:
                    continue
                rivals = [o for o in ours if o.side == b.side and o.mean_field == b.mean_field]
                sign = 1 if b.side == "upper" else -1
                best = min(sign * log_of(o) for o in rivals)
                assert best <= sign * log_of(b) + 1e-6, (seed, n, radius, b.id)
                compared += 1
    assert compared > 60


@pytest.mark.slow
def test_column_exponent():
    """Λ against random search; exact where it is known."""
    r = torch.Generator().manual_seed(0)
    for d in (1, 2, 3, 6):
        g = torch.randn(d, d, generator=r, dtype=F64)
        for A in (g, g @ g.mT, -g @ g.mT, g - g.mT, g + g.mT, g @ g.mT + g - g.mT):
            lam = column_exponents(constants(Attention.from_matrices(A, eye(d))))[0]
            x = torch.randn(64, d, generator=r, dtype=F64)
            a = float(torch.linalg.matrix_norm(A, ord=2))
            for _ in range(2000):
                image = x @ A.mT
                x = x + 0.1 / max(a, 1e-9) * (image / image.norm(dim=-1, keepdim=True).clamp_min(1e-300) @ A - x @ (A + A.mT))
                x = x / x.norm(dim=-1, keepdim=True).clamp_min(1.0)
            found = float(((x @ A.mT).norm(dim=-1) - (x * (x @ A.mT)).sum(-1)).max())
            assert found <= lam * (1 + 1e-12)
            assert lam <= 1.02 * found + 1e-12  # no gap between the two problems
            assert a / 4 * (1 - 1e-9) <= lam <= 2 * a * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-1.0, 3.0), (-1.0, 4.0), (-0.5, 8.0), (0.0, 2.0), (-2.0, 0.5)])
def test_column_exponent_of_symmetric_matrices(low: float, high: float):
    b = -low
    exact = 2 * b if high <= 3 * b else (high - b) / 4 + b + b * b / (high - b)
    A = torch.diag(torch.tensor([low, high, (low + high) / 2, 0.0], dtype=F64))
    found = column_exponents(constants(Attention.from_matrices(A, eye(4))))[0]
    assert exact <= found <= exact * (1 + 1e-6)


def test_heads_together_are_never_worse_than_their_sum():
    r = torch.Generator().manual_seed(0)
    gains = []
    for heads in (2, 4):
        w = [torch.randn(16, 16, generator=r, dtype=F64) for _ in range(4)]
        attn = Attention(*w, heads=heads)
        layer = constants(attn)
        single = value(rows(scalar(1.0), 8, 0.0)["B7"])  # √n
        total = sum(layer.v) * single
        together = value(rows(attn, 8, 0.0)["B7"])
        gains.append(total / together)
        assert together <= total * (1 + 1e-9)
    assert max(gains) > 1.3
    apart = Attention(*w[:3], heads=4)  # nothing adds the heads: their squares add up
    assert value(rows(apart, 8, 0.0)["B7"]) == pytest.approx(8**0.5 * math.hypot(*constants(apart).v))


def test_constants_match_dense_norms():
    r = torch.Generator().manual_seed(0)
    d, heads, kv, head = 20, 4, 2, 3
    w_q, w_k, w_v = (torch.randn(h * head, d, generator=r, dtype=F64) for h in (heads, kv, kv))
    w_o, b_q, b_k = (torch.randn(*s, generator=r, dtype=F64) for s in ((7, heads * head), (heads * head,), (kv * head,)))
    found = constants(Attention(w_q, w_k, w_v, w_o, heads=heads, kv_heads=kv, b_q=b_q, b_k=b_k, scale=-0.7))
    values = []
    for h in range(heads):
        q, k = slice(h * head, (h + 1) * head), slice(h // 2 * head, (h // 2 + 1) * head)
        A = -0.7 * w_k[k].mT @ w_q[q]
        V = w_o[:, q] @ w_v[k]
        values.append(V)
        for got, truth in (
            (found.a[h], torch.linalg.matrix_norm(A, ord=2)),
            (found.v[h], torch.linalg.matrix_norm(V, ord=2)),
            (found.query_shift[h], (0.7 * w_k[k].mT @ b_q[q]).norm()),
            (found.key_shift[h], (0.7 * w_q[q].mT @ b_k[k]).norm()),
        ):
            assert float(truth) <= got <= float(truth) * (1 + 1e-9)
        lifted = found.core.basis[h] @ found.core.matrix[h] @ found.core.basis[h].mT
        assert torch.allclose(lifted, A, atol=1e-12)
        assert torch.allclose(found.core.basis[h] @ found.core.shift[h], -0.7 * w_k[k].mT @ b_q[q], atol=1e-12)
        assert torch.allclose(found.value_maps[h], V, atol=1e-12)
    stacked = float(torch.linalg.matrix_norm(torch.cat(values, 1), ord=2))
    assert stacked <= found.stacked[0] <= stacked * (1 + 1e-9)
    cross = torch.linalg.matrix_norm(values[0].mT @ values[3], ord=2)
    assert float(found.cross[0, 3]) * found.v[0] * found.v[3] == pytest.approx(float(cross))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_norm_radius(kind):
    """Never below what the norm gives, and reached."""
    r = torch.Generator().manual_seed(0)
    for d in (2, 3, 8):
        for beta in (None, torch.randn(d, generator=r, dtype=F64)):
            norm = kind(torch.randn(d, generator=r, dtype=F64), beta, eps=1e-9)
            x = torch.randn(256, 1, d, generator=r, dtype=F64).requires_grad_()
            steps = torch.optim.Adam([x], lr=0.05)
            for _ in range(250):
                steps.zero_grad()
                (-norm(x).norm(dim=-1).sum()).backward()
                steps.step()
            best = float(norm(x.detach()).norm(dim=-1).max())
            assert best <= norm_radius(norm)
            assert norm_radius(norm) <= best * 1.001


def test_l2_attention_refuses():
    w = torch.zeros(1, 2, 2)
    for n in (0, 2.0, True):
        with pytest.raises(BadInputError, match="whole number of tokens"):
            published.l2_bounds(w, w, torch.zeros(2, 2), n)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadInputError, match="one shape"):
        published.l2_bounds(w, w, torch.zeros(2, 3), 2)
    with pytest.raises(BadInputError, match="finite w_v"):
        published.l2_bounds(w, w + torch.nan, torch.zeros(2, 2), 2)
