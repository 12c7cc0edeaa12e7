"""Configurations: the paper's tokens, their growth, ties, and never above the bound."""

import math

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.paper.adversarial import TOKEN_COUNTS, grow, scan
from howsmooth.search.families import (
    Configuration,
    configurations,
    eigenvector_configuration,
    ranked,
    worst_configuration,
)
from howsmooth.search.sets import BallAround, Ellipsoid
from howsmooth.study import fit_growth
from marks import first
from problems.layers import gaussian


def random_head(seed: int, d: int = 4, **options) -> hs.Attention:
    return hs.Attention.from_matrices(gaussian(d, d, seed=seed), gaussian(d, d, seed=seed + 100), **options)


def gpt2_size(**options) -> hs.Attention:
    random = torch.Generator().manual_seed(0)
    w_q, w_k, w_v, w_o = (0.02 * torch.randn(768, 768, generator=random) for _ in range(4))
    return hs.Attention(w_q, w_k, w_v, w_o, heads=12, **options)


def test_the_papers_tokens():
    attn = hs.Attention.from_matrices(torch.diag(torch.tensor([1.0, -2.0, 0.5])), torch.eye(3))
    families = {c.family: c for c in configurations(attn, 4, 3.0) if c.gamma is not None}
    opposite, half = families["opposite"], families["half"]
    assert (opposite.gamma, half.gamma) == (-2.0, 1.0)
    u = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    tokens = opposite.place(4)
    assert torch.allclose(tokens.abs(), (3.0 * u).expand(4, 3))
    assert torch.equal(tokens[1:], -tokens[0].expand(3, 3))
    tokens = half.place(4)
    assert torch.allclose(tokens[1:], tokens[0].expand(3, 3) / 2)
    assert torch.allclose(tokens[0].abs(), 3.0 * torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))
    choice = eigenvector_configuration(attn, 3.0)
    assert choice is not None
    assert choice.family == "opposite"
    steep = hs.Attention.from_matrices(torch.diag(torch.tensor([17.0, -2.0])), torch.eye(2))
    choice = eigenvector_configuration(steep, 3.0)
    assert choice is not None
    assert choice.family == "half"


def test_no_real_eigenvalue():
    turn = hs.Attention.from_matrices(torch.tensor([[0.0, -1.0], [1.0, 0.0]]), torch.eye(2))
    assert eigenvector_configuration(turn, 2.0) is None
    assert {c.family for c in configurations(turn, 6, 2.0)} == {"clusters", "tie"}
    assert worst_configuration(turn, 6, 2.0).estimate.value > 1
    with pytest.raises(BadInputError, match="real eigenvalue"):
        grow(turn, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attn", "radius"),
    [
        (hs.Attention.from_matrices(-torch.eye(1), torch.eye(1)), 3.0),
        (hs.Attention.from_matrices(-torch.eye(3), torch.eye(3), causal=True), 3.0),
        (hs.Attention.from_matrices(torch.diag(torch.tensor([9.0, -1.0])), torch.eye(2)), 4.0),
        (random_head(3, d=3), 12.0),
        (random_head(3, d=3, causal=True), 12.0),
    ],
    ids=["-I", "causal -I", "half", "random", "causal random"],
)
def test_a_head_grows_like_the_root_of_n(attn, radius):
    growth = grow(attn, radius)
    assert growth.exponent == pytest.approx(0.5, abs=0.02)
    for row, log in zip(growth.rows, growth.log_bounds, strict=True):
        assert math.log(row.estimate.upper) <= log


@pytest.mark.slow
@pytest.mark.parametrize(("causal", "lengths"), first([(True, (8, 64, 512)), (False, TOKEN_COUNTS)]))
def test_a_layer_of_gpt2_size_grows_like_the_root_of_n(causal, lengths):
    growth = grow(gpt2_size(causal=causal), 200.0, lengths, head=8)
    assert growth.exponent == pytest.approx(0.5, abs=0.02)
    for row, log in zip(growth.rows, growth.log_bounds, strict=True):
        assert math.log(row.estimate.upper) <= log


def test_exponent_can_be_wrong():
    assert fit_growth([8, 64, 512], [1.0, 4.0, 16.0]).exponent.value == pytest.approx(2 / 3)
    with pytest.raises(BadInputError, match="positive, finite lengths and values"):
        fit_growth([8, 16], [0.0, 1.0])
    with pytest.raises(BadInputError, match="two different lengths"):
        grow(random_head(3, d=3), 1.0, [8])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_atoms_stand_for_tokens(seed):
    """Coinciding tokens act as one atom of a measure: the ranking's order is the order of the measured constants."""
    attn = random_head(seed, d=3)
    order = ranked(attn, 12, 1.5)
    measured = hs.lipschitz_batch(attn, torch.stack([c.place(12) for c in order])).value
    assert float(measured[0]) >= 0.98 * float(measured.max())
    splitting_aside = (measured[:-1] >= measured[1:] * (1 - 0.02)).double().mean()
    assert float(splitting_aside) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [5, 40])
def test_a_tie_reaches_its_lower_bound(n, causal):
    """`L ≥ q |V p| sin θ R |A x| √((n−2k)/2k)` (docs/explanation/worst-inputs.md, Proposition 1)."""
    A, V, radius = gaussian(4, 4, seed=5), gaussian(4, 4, seed=6), 3.0
    attn = hs.Attention.from_matrices(A, V, causal=causal)
    seen = 0
    for c in configurations(attn, n, radius):
        if c.family != "tie":
            continue
        y, other, x = c.coordinates
        g, apart = A @ x, (y - other) / 2
        q = 1 / (1 + (n - 2 * c.few) / (2 * c.few) * math.exp(-float(g @ (y - x))))
        bound = q * float((V @ apart).norm() * g.norm()) * math.sqrt((n - 2 * c.few) / (2 * c.few))
        assert abs(float(g @ apart)) < 1e-9 * float(g.norm()) * radius
        assert hs.lipschitz(attn, c.place(n)).value >= bound * (1 - 1e-9)
        seen += 1
    assert seen >= 5


def test_ties_come_within_a_factor_two_of_b7():
    attn = random_head(0)
    worst = worst_configuration(attn, 256, 4.0)
    assert worst.configuration.family == "tie"
    bound = hs.bounds(attn, n=256, radius=4.0).by_id("B7").value
    assert bound is not None
    assert worst.estimate.value > 0.5 * bound


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 2}])
def test_never_above_the_bound(n, options):
    for seed in range(2):
        for attn in (random_head(seed, d=1, **options), random_head(seed, d=3, **options)):
            worst = worst_configuration(attn, n, 2.0)
            upper = hs.bounds(attn, n=n, radius=2.0).upper
            assert upper is not None
            assert upper.log_value is not None
            assert worst.tokens.shape == (n, attn.width)
            assert math.log(max(worst.estimate.value, 1e-300)) <= upper.log_value


@pytest.mark.slow
def test_layers_with_everything():
    attn = hs.Attention(
        gaussian(8, 6, seed=1),
        gaussian(4, 6, seed=2),
        gaussian(6, 6, seed=3),
        gaussian(5, 12, seed=4),
        heads=4,
        kv_heads=2,
        b_q=gaussian(8, seed=5),
        softcap=3.0,
    )
    chosen = worst_configuration(attn, 9, 2.0, head=2, certify=0.02)
    assert chosen.configuration.head == 2
    assert chosen.estimate.width <= 0.02
    assert worst_configuration(attn, 9, 2.0).estimate.value >= 0.98 * chosen.estimate.value
    assert isinstance(chosen.to_dict()["family"], str)


def test_ellipsoids():
    norm = hs.LayerNorm(gaussian(5, seed=1), gaussian(5, seed=2))
    space = Ellipsoid(norm)
    found = worst_configuration(random_head(1, d=5), 9, space)
    back = (found.tokens - norm.bias) / norm.weight  # type: ignore[operator]
    assert torch.allclose(space.project(back[None])[0], back, atol=1e-9)
    assert "half" not in {c.family for c in configurations(random_head(1, d=5), 9, space)}


def test_scan_covers_the_grid():
    rows = scan(random_head(0), [1.0, 2.0], [4, 8])
    assert [(row.reach, row.n) for row in rows] == [(1.0, 4), (1.0, 8), (2.0, 4), (2.0, 8)]
    assert rows[3].estimate.value > rows[0].estimate.value


def test_counts():
    c = Configuration("tie", 0, 2, None, torch.zeros(3, 2))
    assert c.counts(7) == [2, 2, 3]
    assert c.counts(3) == [2, 1, 0]
    assert c.place(3).shape == (3, 2)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda a: configurations(a, 4, -1.0), "radius > 0"),
        (lambda a: configurations(a, 0, 1.0), "at least 1"),
        (lambda a: configurations(a, 4, 1.0, head=1), "between 0 and 0"),
        (lambda a: configurations(a @ hs.RMSNorm(torch.ones(4)), 4, 1.0), "an Attention layer"),
        (lambda a: configurations(a, 4, BallAround(torch.zeros(4, 4), 1.0)), "need room"),
        (lambda a: configurations(a, 4, Ellipsoid(hs.RMSNorm(torch.ones(3)))), "width 3"),
        (lambda a: grow(a, 1.0, [8, 4]), "growing whole lengths"),
        (lambda a: grow(a, 1.0, [1, 4]), "growing whole lengths"),
        (lambda a: configurations(random_mask(), 4, 1.0), "without padding"),
    ],
)
def test_bad_input(call, sentence):
    with pytest.raises(BadInputError, match=sentence):
        call(random_head(0))


def random_mask() -> hs.Attention:
    eye = torch.eye(2)
    return hs.Attention(eye, eye, eye, attention_mask=torch.ones(1, 4, dtype=torch.bool))
