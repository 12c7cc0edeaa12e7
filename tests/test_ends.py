"""Both ends of an interval where rounding decides: the norm lies between them, in eighty digits, whatever cancels."""

import math
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.maps import Composition, Map
from howsmooth.spectral import DenseSVD, Estimate, GolubKahan
from howsmooth.spectral.operator import Rounded
from marks import first
from problems.exact_layers import SOLVERS, Ends, all_ends, cancelling, exact, jacobian, norm, stretch
from problems.hostile_layers import hostile, largest_singular_value
from problems.layers import gaussian
from problems.spectra import attention

LAYERS, PARTS = 360, 6


def opposed(share: float, n: int = 3, d: int = 2) -> tuple[hs.Attention, Tensor]:
    """Two heads whose outputs cancel up to a share of them."""
    w_q, w_k, w_v, w_o = (gaussian(d, d, seed=s) for s in range(4))
    near = w_v * (1 + share * gaussian(d, d, seed=5))
    both = torch.cat([w_q, w_q]), torch.cat([w_k, w_k]), torch.cat([w_v, near]), torch.cat([w_o, -w_o], 1)
    return hs.Attention(*both, heads=2), gaussian(n, d, seed=6)


@pytest.mark.slow
@pytest.mark.parametrize("part", first(range(PARTS)))
def test_no_interval_leaves_the_norm_out(part: int):
    ends = all_ends(LAYERS // PARTS, first=part * LAYERS // PARTS)
    assert ends.wrong == []
    assert ends.lower > 3 * LAYERS // PARTS
    assert ends.zero < 0.4 * ends.lower  # not a way out: as many layers cancel to the last digit
    assert ends.infinite < 0.1 * ends.upper
    assert ends.refused < 0.4 * (ends.upper + ends.refused)  # nearly all of them rigorous


@pytest.mark.parametrize("seed", [0, 4, 9, 13, 20, 27, 31, 40, 45, 49])
def test_intervals_of_layers_that_cancel(seed: int):
    ends = Ends()
    ends.examine(*cancelling(seed))
    assert ends.wrong == []
    assert ends.lower >= 2


@pytest.mark.parametrize("seed", [1, 237, 254, 309, 467])
def test_intervals_of_hostile_layers(seed: int):
    case, ends = hostile(seed, items=1), Ends()
    ends.examine(case.layer, case.x[0], case.name)
    assert ends.wrong == []
    assert ends.lower >= 2


@pytest.mark.parametrize("solver", [DenseSVD(), GolubKahan()], ids=["dense", "products"])
def test_heads_that_cancel_to_the_last_digit_have_a_lower_end_of_zero(solver: Any):
    layer, x = opposed(0.0)
    found = hs.lipschitz(layer, x, solver=solver)
    assert norm(jacobian(layer, x)) < Decimal("1e-70")
    assert found.lower == 0
    assert found.width in (0.0, math.inf)


@pytest.mark.parametrize("share", [1e-15, 1e-9])
def test_every_question_has_the_same_lower_end(share: float):
    layer, x = opposed(share)
    truth = norm(jacobian(layer, x))
    found = hs.lipschitz(layer, x)
    assert Decimal(found.lower) <= truth <= Decimal(found.upper)
    other = gaussian(3, 2, seed=8)
    batch = hs.lipschitz_batch(layer, torch.stack([x, 1e3 * other, other]))
    assert batch.lower.tolist() == [e.lower for e in batch]
    assert batch.value.tolist() == [e.value for e in batch]
    for e, t in zip(batch, (x, 1e3 * other, other), strict=True):
        assert Decimal(e.lower) <= norm(jacobian(layer, t)) <= Decimal(e.upper)
    assert batch[0].lower == pytest.approx(found.lower, rel=1e-9)
    J = jacobian(layer, x).reshape(3, 2, 3, 2)
    some = hs.lipschitz(layer, x, tokens=[0, 2])
    assert Decimal(some.lower) <= norm(J[:, :, [0, 2]].reshape(6, 4)) <= Decimal(some.upper)
    near = hs.lipschitz(layer, x, within=0.01, steps=3)
    assert near.point is not None
    assert Decimal(near.lower) <= norm(jacobian(layer, near.point))
    assert near.lower <= near.value <= near.upper
    worst = hs.worst_case(layer, n=3, radius=1.0, steps=3, restarts=4)
    assert Decimal(worst.estimate.lower) <= norm(jacobian(layer, worst.tokens))


def test_measures_and_splitting_where_heads_cancel():
    layer, x = opposed(0.0)
    split = hs.splitting(layer, x)
    assert (split.moved.lower, split.split.lower) == (0.0, 0.0)
    measure = hs.Measure(x, torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64))
    assert hs.lipschitz(layer, measure).lower == 0
    near, x = opposed(1e-9)
    split, J = hs.splitting(near, x), jacobian(near, x)
    assert Decimal(split.moved.lower) <= norm(J) <= Decimal(split.moved.upper)
    assert split.split.lower <= split.split.value <= split.split.upper


def ordinary() -> list[tuple[str, Map, Tensor]]:
    layer, x = attention(5, 4, seed=3, heads=2)
    causal, _ = attention(5, 4, seed=4, causal=True)
    return [
        ("layer", layer, x),
        ("causal, float32", causal.to(torch.float32), x.float()),
        ("after a norm", layer @ hs.LayerNorm(torch.ones(4, dtype=torch.float64)), x),
        ("sink", replace(layer, kind=hs.kinds.Softmax(torch.tensor([1.0, -40.0]))), x),
        ("mask in the bias", replace(layer, bias=torch.full((5, 5), -1e30).triu(1)[None, None].double()), x),
    ]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("name", "f", "x"), ordinary(), ids=[name for name, *_ in ordinary()])
def test_ordinary_layers_give_up_few_digits(name: str, f: Map, x: Tensor, solver: str):
    found, J = hs.lipschitz(f, x, solver=SOLVERS[solver], tol=1e-6), jacobian(f, x)
    Ends().compare(found, J, name)
    assert float(stretch(J, found.direction)) == pytest.approx(found.value, rel=1e-13)
    assert found.value * (1 - 1e-8) < found.lower < found.value
    assert found.status != "step limit"


def test_the_value_is_what_the_direction_attains_and_lower_is_less():
    layer, x = opposed(1e-9)
    found = hs.lipschitz(layer, x)
    by_hand = hs.jacobian(layer, x) @ found.direction
    assert float(by_hand.norm() / found.direction.norm()) == pytest.approx(found.value, rel=1e-13)
    assert found.lower < (1 - 1e-9) * found.value
    assert found.to_dict()["value"] == found.value
    assert found.to_dict()["lower"] == found.lower
    narrow = hs.lipschitz(layer, x, certify=1e-10, solver=GolubKahan())
    assert narrow.status == "step limit"
    assert narrow.note.startswith("Rounding alone leaves the interval wider")


@pytest.mark.slow
@pytest.mark.parametrize("solver", [DenseSVD(), GolubKahan()], ids=["dense", "products"])
def test_what_is_assumed_where_nothing_is_proved(solver: Any):
    layer, x = attention(6, 4, seed=1)
    for f in (torch.sin, torch.nn.Linear(4, 4).double(), replace(layer, kind=hs.kinds.Sigmoid(-1.0))):
        found = hs.lipschitz(f, x, solver=solver)
        assert "small beside" in found.assumes
        assert ("random start" in found.assumes) == isinstance(solver, GolubKahan)
        assert found.lower == found.value
    assert "small beside" not in hs.lipschitz(layer, x, solver=solver).assumes


def error_and_bound(f: Map, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """By how much the rows of a product are off, in eighty digits, and what is said of it, (n,)."""
    product = f.linearize(x[None])[1].rounded(Rounded.exact(v[None, None]))
    assert product.off is not None
    truth = (jacobian(f, x) @ exact(v).ravel()).reshape(len(x), -1)
    apart = exact(product.vector[0, 0]) - truth
    return torch.tensor([float((row @ row).sqrt()) for row in apart]), product.off[0, 0]


@pytest.mark.parametrize("seed", range(0, 54, 5))
def test_rows_of_a_product_are_within_their_bound(seed: int):
    f, x, what = cancelling(seed)
    for v in (gaussian(*x.shape, seed=1), torch.ones_like(x), torch.eye(*x.shape, dtype=x.dtype)):
        off, said = error_and_bound(f, x, v)
        assert bool((off <= said).all()), what
        assert bool((off > 1e-9 * said).any()) or not bool(off.any()), what  # it says something


def test_a_composition_knows_that_its_norm_is_rounded():
    """Tokens far from zero: what LayerNorm gives is off, and the layer behind it is linearised there."""
    layer, x = attention(4, 3, seed=2, gain=30.0)
    f, far = layer @ hs.LayerNorm(torch.ones(3, dtype=torch.float64)), x + 1e6
    v = gaussian(4, 3, seed=1)
    off, said = error_and_bound(f, far, v)
    assert bool((off <= said).all())
    assert isinstance(f, Composition)
    middle, inner = f.inner.linearize(far[None])
    entered = inner.rounded(Rounded.exact(v[None, None]))
    assert entered.moved is not None
    assert float(entered.moved) > 1e-12
    unaware = f.outer.linearize(middle)[1].rounded(entered._replace(moved=torch.zeros(1, dtype=torch.float64)))
    assert unaware.off is not None
    assert bool((unaware.off[0, 0] < 0.1 * said).all())
    for solver in SOLVERS.values():
        found = hs.lipschitz(f, far, solver=solver, tol=0.1)
        assert Decimal(found.lower) <= norm(jacobian(f, far)) <= Decimal(found.upper)


def test_the_truth_agrees_with_other_formulas():
    for seed in range(40):
        case = hostile(seed, items=1)
        if case.layer.dtype == torch.float64 and "e-150" not in case.name and "e+150" not in case.name:
            truth = float(largest_singular_value(case.layer, case.x)[0])
            assert float(norm(jacobian(case.layer, case.x[0]))) == pytest.approx(truth, rel=1e-9, abs=1e-60), case.name


def test_the_check_refuses_wrong_ends():
    layer, x = opposed(1e-9)
    J, right = jacobian(layer, x), hs.lipschitz(layer, x)

    def wrong(found: Estimate) -> int:
        ends = Ends()
        ends.compare(found, J, "")
        return len(ends.wrong)

    truth = float(norm(J))
    assert wrong(right) == 0
    assert wrong(replace(right, lower=truth * (1 + 1e-9), value=truth * (1 + 1e-9), upper=2 * truth)) == 1
    assert wrong(replace(right, lower=0.0, value=0.0, upper=truth * (1 - 1e-9))) == 1
    assert wrong(replace(right, lower=right.value * 2)) == 1
    assert wrong(replace(right, upper=right.value / 2)) == 1
