"""Several singular values: no interval misses, on every spectrum, and they are as narrow as was asked."""

from typing import Any

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.spectral import GolubKahan, Operator, Solution, golub_kahan
from howsmooth.spectral.spaces import LOOSE, SMALLEST
from marks import first
from problems.layers import random_layer
from problems.spectra import SPECTRA, Diagonal, rotated, shuffled, spectrum

K = 8


def misses(operator: Operator, item: int, solution: Solution, truth: Tensor) -> int:
    """How many intervals leave their singular value out, but for what rounding moves."""
    top, noise = float(truth[0]), operator.noise
    values, uppers = (torch.tensor(side, dtype=torch.float64) for side in (solution.values, solution.uppers))
    uppers = (uppers.square() + noise * top**2).sqrt() + noise * top
    probes = solution.directions[:, None].expand(-1, operator.batch, *operator.in_shape).to(operator.dtype)
    attained = torch.linalg.svdvals(operator.jvp(probes)[:, item].flatten(1).double())
    far = (attained - values).abs() > noise**0.5 * top
    return int(((attained > truth + noise * top) | far | (uppers < truth)).sum())


def widest(solution: Solution, noise: float) -> float:
    """Of the intervals, but for what rounding adds to them."""
    values, uppers = (torch.tensor(side, dtype=torch.float64) for side in (solution.values, solution.uppers))
    sizes, room = values.clamp_min(SMALLEST * solution.value), noise**0.5 * solution.value
    return float(torch.where(uppers > values + room, (uppers - values - room) / sizes, 0.0).max())


@pytest.mark.parametrize("dtype", first([torch.float64, torch.float32]), ids=str)
@pytest.mark.parametrize("size", first([300, 40, 1500]))
@pytest.mark.parametrize("name", SPECTRA)
def test_every_interval_holds(name: str, size: int, dtype: torch.dtype):
    values = spectrum(name, size)
    truth = values[:K].to(dtype).double()
    for seed, certify in enumerate((0.02, None)):
        operator = shuffled(values, 2, seed, dtype)
        for item, solution in enumerate(GolubKahan().solve(operator, 1e-3, certify, [seed] * 2, k=K)):
            assert misses(operator, item, solution, truth) == 0
            assert solution.converged
            assert widest(solution, operator.noise) <= (certify or LOOSE)
            if certify is None:
                found, top = torch.tensor(solution.values, dtype=torch.float64), float(truth[0])
                hidden = operator.noise * top**2 / (truth + operator.noise**0.5 * max(top, 1e-300))  # in the root of a square
                assert bool(((found - truth).abs() <= 1e-3 * truth.clamp_min(SMALLEST * top) + hidden).all())


def test_the_checker_sees_ends_that_are_wrong():
    operator, truth = shuffled(spectrum("flat", 300), 1, 0), spectrum("flat", 300)
    (solution,) = GolubKahan().solve(operator, 1e-3, 0.02, [0], k=K)
    assert misses(operator, 0, solution, truth[1 : K + 1]) > 0
    assert misses(operator, 0, solution, 1.02 * truth[:K]) > 0
    assert widest(solution, 0.0) > 0


@pytest.mark.parametrize("shape", [(60, 90), (90, 60)])
def test_between_random_bases(shape: tuple[int, int]):
    for seed, name in enumerate(SPECTRA):
        operator = rotated(spectrum(name, min(shape)), *shape, seed=10 * seed)
        (solution,) = GolubKahan().solve(operator, 1e-3, 0.02, [seed], k=K)
        assert misses(operator, 0, solution, spectrum(name, min(shape))[:K]) == 0


@pytest.mark.parametrize("copies", [2, 3, 9])
def test_copies_of_a_value_are_all_found(copies: int):
    """One start sees one direction of each eigenspace: the others need further spaces, which a certificate asks for."""
    values = torch.cat([torch.full((copies,), 1.0), torch.full((copies,), 0.9), torch.linspace(0.85, 0, 400)]).double()
    operator, truth = shuffled(values, 1, copies), values[:K]
    (solution,) = GolubKahan().solve(operator, 1e-3, 0.02, [copies], k=K)
    assert misses(operator, 0, solution, truth) == 0
    assert solution.converged


@pytest.mark.slow
@pytest.mark.parametrize("name", ["equal", "clustered", "flat", "slow"])
def test_intervals_fail_no_more_often_than_they_say(name: str):
    """δ = 0.2 over 60 orders of a spectrum, each with a seed of its own; four standard deviations over the mean are allowed."""
    values, trials, risk = spectrum(name, 200), 60, 0.2
    operator, solver = shuffled(values, trials, 0), GolubKahan(delta=risk)
    solutions = solver.solve(operator, 1e-3, 0.1, list(range(trials)), k=4)
    failed = sum(misses(operator, item, solution, values[:4]) > 0 for item, solution in enumerate(solutions))
    assert failed <= trials * risk + 4 * (trials * risk * (1 - risk)) ** 0.5


def test_a_bad_guess_never_costs_the_certificate():
    values = spectrum("clustered", 400)
    for place in (0, 1, 200):
        guess = torch.nn.functional.one_hot(torch.tensor([place]), 400).double()
        operator = Diagonal(values[None], guess)
        (solution,) = GolubKahan().solve(operator, 1e-3, 0.02, [place], k=K)
        assert misses(operator, 0, solution, values[:K]) == 0


def test_the_bound_on_blocks():
    """Theorem 2.10 on matrices at hand; without what couples the blocks it fails."""
    wrong, random = 0, torch.Generator().manual_seed(0)
    for m, f in [(4, 1), (6, 2), (9, 3)] * 20:
        A = torch.randn(20, 20, generator=random, dtype=torch.float64)
        M = A @ A.mT
        Q = torch.linalg.qr(M @ torch.randn(20, m, generator=random, dtype=torch.float64))[0]
        S, R = Q.mT @ M @ Q, M @ Q - Q @ (Q.mT @ M @ Q)
        F, turn = torch.linalg.qr(R)
        G, P = turn.mT, torch.eye(20, dtype=torch.float64) - Q @ Q.mT
        truth = torch.linalg.eigvalsh(M).flip(0)[:m]
        for x in (0.1, 1.0, 10.0):
            beside = torch.linalg.eigvalsh(P @ M @ P + x * F @ F.mT)[-1]
            bound = torch.linalg.eigvalsh(S + G @ G.mT / x).flip(0).maximum(beside)
            assert bool((truth <= bound * (1 + 1e-12)).all())
            wrong += int((truth > torch.linalg.eigvalsh(S).flip(0).maximum(torch.linalg.eigvalsh(P @ M @ P)[-1])).any())
        assert f
    assert wrong > 0


def test_what_is_known_of_the_spaces_is_what_the_products_say(monkeypatch: pytest.MonkeyPatch):
    """`QᵀMQ` over all spaces, what leaves them, and in the last one the products that its certificate is about."""
    runs: list[Any] = []
    start = golub_kahan._Iteration._start
    monkeypatch.setattr(golub_kahan._Iteration, "_start", lambda self: runs.append(self) or start(self))
    operator = shuffled(torch.cat([torch.ones(2), torch.linspace(0.9, 0, 150)]).double(), 1, 0)
    GolubKahan().solve(operator, 1e-3, 0.02, [0], k=3)
    (run,) = runs
    spaces, Q = run.spaces, torch.cat([chunk[0] for chunk in run.basis.chunks])
    M, F = operator.values[0].square().diag(), run.left
    assert spaces.count > 1
    assert float((Q @ M @ Q.mT - spaces._joint).abs().max()) < 1e-12
    own = Q[-run.alpha.shape[1] :]
    assert torch.allclose((own @ (M + spaces.x * F.mT @ F) * own).sum(-1), run.alpha[0], atol=1e-12)
    before = Q[: -run.alpha.shape[1]]
    outside = before @ M - before @ M @ before.mT @ before
    assert float((outside - spaces._G @ F).abs().max()) < 1e-12
    assert spaces.x > 0


def checked(found: hs.Spectrum, truth: Tensor) -> None:
    """Ends around the true values, and directions that are singular ones."""
    assert bool((found.lower <= truth).all())
    assert bool((found.upper >= truth).all())
    U, V = found.left.flatten(1).double(), found.right.flatten(1).double()
    one = torch.eye(len(found), dtype=torch.float64)
    assert float((U @ U.mT - one).abs().max()) < 1e-5
    assert float((V @ V.mT - one).abs().max()) < 1e-5


@pytest.mark.parametrize("seed", first([0, *range(1, 30)]))
def test_random_layers(seed: int):
    layer, x = random_layer(seed)
    J = hs.jacobian(layer.to(torch.float64), x.double()).dense()
    k = min(K, *J.shape)
    found = hs.lipschitz(layer, x, k=k, certify=0.02, solver=GolubKahan())
    checked(found, torch.linalg.svdvals(J)[:k])
    assert found.status == "certified"
    assert float(found.widths.max()) <= 0.02
    image = J @ found.right.flatten(1).mT.double()
    assert float((image - found.left.flatten(1).mT * found.values).abs().max()) <= 1e-6 * found.value


def test_scipy_finds_the_same_values():
    svds = pytest.importorskip("scipy.sparse.linalg").svds
    layer, x = random_layer(3, n=12, width=32)
    layer, x = layer.to(torch.float64), x.double()
    truth = sorted(svds(hs.jacobian(layer, x).to_scipy(), k=5, return_singular_vectors=False), reverse=True)
    found = hs.lipschitz(layer, x, k=5, certify=1e-3)
    assert found.values.tolist() == pytest.approx(truth, rel=1e-3)
    checked(found, torch.tensor(truth) * (1 + 1e-14))


def test_one_value_is_the_estimate():
    layer, x = random_layer(5, n=12, width=32)
    alone, found = hs.lipschitz(layer, x, certify=0.02), hs.lipschitz(layer, x, k=1, certify=0.02)
    assert found.estimate.to_dict() == alone.to_dict()
    assert found.upper.tolist() == [alone.upper]
    assert (float(found), found.gap, found.status, len(found)) == (alone.value, 1.0, "certified", 1)
    assert torch.equal(found.right[0], alone.direction)


def test_a_rank_that_is_smaller_is_told():
    found = hs.lipschitz(lambda t: t[:3] @ torch.eye(3, 400, dtype=torch.float64), torch.ones(300).double(), k=5, certify=0.02)
    assert found.values.tolist() == pytest.approx([1.0, 1.0, 1.0, 0.0, 0.0], abs=1e-12)
    assert found.values[3:].tolist() == [0.0, 0.0]
    assert found.rank == 3
    assert found.note.endswith("The last 2 values are 0 to rounding: the Jacobian has rank 3.")
    assert "one of 3: so many values are within 2 % of the largest one." in found.note
    checked(found, torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]).double())
    zero = hs.lipschitz(lambda t: 0 * t, torch.ones(300).double(), k=2, certify=0.02)
    assert (zero.values.tolist(), zero.upper.tolist(), zero.rank, zero.gap) == ([0.0, 0.0], [0.0, 0.0], 0, 0.0)


def test_what_rounding_takes_of_an_interval_the_run_gives():
    """Logits of 14 000: what is proved of rounding is a share of the largest value, more than a tenth of 2 % of the last."""
    layer, x = random_layer(91)
    found = hs.lipschitz(layer, x, k=K, certify=0.02, solver=GolubKahan())
    checked(found, torch.linalg.svdvals(hs.jacobian(layer.to(torch.float64), x.double()).dense())[:K])
    assert found.status == "certified"
    assert float(found.widths.max()) <= 0.02
    finer = hs.lipschitz(layer, x, k=K, certify=0.002, solver=GolubKahan())
    assert finer.status == "step limit"
    assert finer.note.startswith("Rounding leaves the interval of a small value wider than certify asks")


def test_tokens_that_are_frozen_have_no_part():
    layer, x = random_layer(5, n=12, width=32)
    found = hs.lipschitz(layer, x, k=3, tokens=range(3, 12), certify=0.02)
    columns = hs.jacobian(layer.to(torch.float64), x.double()).dense().unflatten(1, (12, 32))[:, 3:].flatten(1)
    checked(found, torch.linalg.svdvals(columns)[:3])
    assert found.right.shape == (3, 12, 32)
    assert not bool(found.right[:, :3].any())


def test_a_layer_of_a_model():
    model = hs.load("demo", device="cpu")
    one = model.measure("A cat sat.", 3, k=3, certify=0.02)
    assert one.spectrum is not None
    assert one.value == one.spectrum.value
    assert one.spectrum.left.shape == one.spectrum.right.shape == (3, 6, 384)
    assert one.to_dict()["spectrum"]["values"] == one.spectrum.values.tolist()
    both = model.capture(windows=["A cat sat.", "A dog ran."]).measure([3], k=2, certify=0.02)
    for m in both:
        assert m.spectrum is not None
    assert both[0].spectrum.values.tolist() == pytest.approx(one.spectrum.values[:2].tolist(), rel=2e-3)  # pyright: ignore
    far = model.measure("A cat sat.", layer=1, to=4, k=2)
    assert far.spectrum is not None
    assert 0 < far.spectrum.gap < 1


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"k": 0}, "expected a whole number k ≥ 1 of singular values, got 0"),
    ({"k": 2.0}, "expected a whole number k ≥ 1 of singular values, got 2.0"),
    ({"k": 1000}, "expected k from 1 to 384, as many singular values as there are, got 1000"),
    ({"k": 2, "within": 0.1}, "expected k at one input, got it beside within or a measure"),
    ({"k": 2, "solver": GolubKahan(rigorous=True)}, "expected k=1 for rigorous=True, got more"),
    ({"k": 9, "solver": GolubKahan(max_steps=9)}, "expected max_steps above k=9, got 9"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_what_cannot_be_answered_is_refused(given: dict[str, Any], said: str):
    layer, x = random_layer(5, n=12, width=32)
    with pytest.raises(BadInputError, match=said):
        hs.lipschitz(layer, x, **given)
    with pytest.raises(BadInputError, match="expected none of heads, closed, gain, k beside within"):
        hs.load("demo", device="cpu").measure("A cat sat.", 3, k=2, within=0.1)


def test_too_few_steps_hold_all_the_same():
    layer, x = random_layer(5, n=12, width=32)
    truth = torch.linalg.svdvals(hs.jacobian(layer.to(torch.float64), x.double()).dense())[:3]
    for steps in (4, 8, 12):
        found = hs.lipschitz(layer, x, k=3, certify=0.02, solver=GolubKahan(max_steps=steps))
        checked(found, truth)
        assert found.steps <= steps
    assert hs.lipschitz(layer, x, k=3, certify=0.02, solver=GolubKahan(max_steps=4)).note.startswith("4 steps were not enough")
