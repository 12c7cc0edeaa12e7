"""The solver: the right number, on every spectrum, and stops that mean what they say."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.spectral import GolubKahan, Operator, Solution, golub_kahan
from howsmooth.spectral.basis import CHUNK
from marks import first
from problems.spectra import SPECTRA, Diagonal, Matrix, attention, beside, norm_of, orthogonal, rotated, shuffled, spectrum

NOISE = 32 * torch.finfo(torch.float64).eps


def attained(operator: Operator, solution: Solution, item: int = 0) -> float:
    v = solution.direction[None, None].expand(1, operator.batch, *operator.in_shape)
    return float(operator.jvp(v)[0, item].norm())


def solve(operator: Operator, solver: GolubKahan | None = None, tol: float = 1e-8, certify: float | None = None, seed: int = 0):
    return (solver or GolubKahan()).solve(operator, tol, certify, [seed] * operator.batch)


def mixed(n: int = 60, names: tuple[str, ...] = tuple(SPECTRA)) -> Matrix:
    """One matrix of every spectrum, as a batch: some close their Krylov space at once, some never."""
    return Matrix(torch.cat([rotated(spectrum(name, n), n, n, seed=10 * i).matrix for i, name in enumerate(names)]))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(60, 60), (50, 90), (90, 50), (1, 40), (40, 1), (7, 5)])
@pytest.mark.parametrize("name", SPECTRA)
def test_value_is_the_norm(name: str, shape: tuple[int, int]):
    if min(shape) < 6:
        values = torch.ones(min(shape), dtype=torch.float64) if name != "zero" else torch.zeros(min(shape)).double()
    else:
        values = spectrum(name, min(shape))
    operator = rotated(values, *shape, seed=3, batch=2)
    for item, solution in enumerate(solve(operator)):
        truth = float(torch.linalg.svdvals(operator.matrix[item])[0])
        assert solution.value == pytest.approx(truth, rel=1e-6, abs=1e-300)
        assert attained(operator, solution, item) == pytest.approx(truth, rel=1e-6, abs=1e-300)
        assert solution.upper >= truth * (1 - NOISE)


def test_nothing_is_stretched_by_the_zero_matrix():
    (solution,) = solve(Matrix(torch.zeros(1, 30, 40, dtype=torch.float64)))
    assert (solution.value, solution.upper) == (0.0, 0.0)
    assert float(solution.direction.norm()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("n", "d", "options"),
    [
        (1, 1, {}),
        (1, 7, {}),
        (9, 1, {}),
        (6, 5, {"out": 1}),
        (5, 6, {"width": 1}),
        (8, 6, {"heads": 3, "causal": True}),
        (8, 6, {"heads": 2, "gain": 30.0}),
        (12, 4, {"heads": 2, "window": 3}),
        (7, 4, {"softcap": 2.0}),
        (33, 6, {"heads": 2, "out": 9}),
    ],
    ids=str,
)
def test_attention_layers(n: int, d: int, options: dict):
    layer, x = attention(n, d, seed=n * d, **options)
    est = hs.lipschitz(layer, x, tol=1e-8, solver=GolubKahan())
    truth = norm_of(layer, x)
    assert est.value == pytest.approx(truth, rel=1e-6)
    assert est.lower <= truth * (1 + NOISE)
    assert est.upper >= truth * (1 - NOISE)


@pytest.mark.parametrize("which", ["w_o", "w_v"])
def test_attention_that_is_zero(which: str):
    layer, x = attention(8, 6, seed=0)
    silent = replace(layer, **{which: torch.zeros(6, 6).double()})
    est = hs.lipschitz(silent, x, solver=GolubKahan())
    assert (est.value, est.upper, est.width) == (0.0, 0.0, 0.0)


def test_attention_of_rank_one():
    """Uniform attention with V = abᵀ on n tokens: the mean, then rank one."""
    a, b = torch.randn(2, 6, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layer = hs.Attention.from_matrices(torch.zeros(6, 6).double(), a @ b.mT)
    est = hs.lipschitz(layer, torch.zeros(8, 6).double(), tol=1e-8, solver=GolubKahan())
    assert est.value == pytest.approx(float(a.norm() * b.norm()), rel=1e-10)


def random_layer(seed: int) -> tuple[hs.Attention, Tensor]:
    random = torch.Generator().manual_seed(seed)
    n, d = int(torch.randint(2, 40, (), generator=random)), 2 * int(torch.randint(1, 8, (), generator=random))
    gain = 10 ** float(torch.rand((), generator=random) * 3 - 1)
    causal = bool(torch.randint(2, (), generator=random))
    return attention(n, d, seed, heads=1 + seed % 2, gain=gain, causal=causal, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", first([range(50), range(50, 150)]), ids=["first", "more"])
def test_converged_values_of_random_layers(seeds: range):
    """float32 tokens. The interval always holds; `value` is within `tol` in all but one layer."""
    missed = []
    for seed in seeds:
        layer, x = random_layer(seed)
        truth = norm_of(layer.to(torch.float64), x)
        for tol in (1e-3, 1e-2):
            est = hs.lipschitz(layer, x, tol=tol, solver=GolubKahan())
            assert est.lower <= truth * (1 + NOISE), seed
            assert est.upper >= truth, seed
            if est.value < truth * (1 - tol):
                missed.append((seed, tol, est.value / truth))
    assert len(missed) <= 1, missed


@pytest.mark.parametrize("ratio", [1.002, 1.005, 1.02, 1.06, 1.17])
@pytest.mark.parametrize("tol", [1e-3, 1e-2])
def test_values_that_hide_from_a_fixed_start(ratio: float, tol: float):
    """Uniform attention, whose constant is `‖V‖`; the top input of `V` is orthogonal to what seed 0 drew for guesses once."""
    d = 32
    fixed = torch.randn(d, generator=torch.Generator().manual_seed(0))
    for case in range(4):
        sigma = torch.cat([torch.tensor([ratio]), torch.linspace(1, 0.1, d - 1)]).double()
        V = orthogonal(d, case)[0] * sigma @ beside(fixed, case + 10).mT
        x = torch.randn(40, d, generator=torch.Generator().manual_seed(case))
        est = hs.lipschitz(hs.Attention.from_matrices(torch.zeros(d, d), V.float()), x, tol=tol, solver=GolubKahan())
        assert est.value == pytest.approx(ratio, rel=tol)


@pytest.mark.parametrize("gain", [1e2, 1e4, 1e6])
def test_sharp_attention(gain: float):
    """`A = −gain · I` on tokens of positive products: every token copies the first, and three copies of it give √3."""
    eye, tokens = torch.eye(4).double(), torch.arange(1.0, 4)[:, None] + torch.linspace(0, 0.3, 4)
    est = hs.lipschitz(hs.Attention.from_matrices(-gain * eye, eye), tokens.double(), tol=1e-6, solver=GolubKahan())
    # terms of size |A x| |x| cancel
    assert est.value == pytest.approx(3**0.5, rel=100 * gain * torch.finfo(torch.float64).eps)


@pytest.mark.parametrize("multiplicity", [1, 2, 5, 20])
def test_exact_multiplicity(multiplicity: int):
    """Few distinct values: Krylov spaces close before they hold every copy."""
    values = torch.cat([torch.full((multiplicity,), 3.0), torch.full((20,), 2.0), torch.full((20,), 1.0)]).double()
    operator = shuffled(values, 6, seed=multiplicity)
    for certify in (None, 1e-6):
        for item, solution in enumerate(solve(operator, GolubKahan(max_steps=30), certify=certify)):
            assert solution.value == pytest.approx(3.0, rel=1e-9)
            assert attained(operator, solution, item) == pytest.approx(3.0, rel=1e-9)


@pytest.mark.parametrize("certify", [0.02, 0.005])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_certified_means_certified(certify: float, dtype: torch.dtype):
    layer, x = attention(40, 8, seed=1, heads=2, gain=4.0, dtype=dtype)
    est = hs.lipschitz(layer, x, certify=certify)
    assert est.status == "certified"
    assert est.upper / est.lower <= 1 + certify
    assert est.lower <= norm_of(layer.to(torch.float64), x) <= est.upper
    assert est.steps < x.numel()


@pytest.mark.parametrize("name", ["isolated", "clustered", "equal", "flat", "slow", "fast"])
def test_certified_width_on_spectra(name: str):
    for solution in solve(shuffled(spectrum(name, 2000), 4, seed=0), certify=0.02):
        assert solution.upper / solution.value <= 1.02
        assert solution.steps < 200


def test_step_limit_is_honoured():
    layer, x = attention(40, 8, seed=1)
    for certify in (None, 0.02):
        est = hs.lipschitz(layer, x, tol=1e-8, certify=certify, solver=GolubKahan(max_steps=2))
        assert (est.status, est.steps) == ("step limit", 2)
        assert est.lower <= norm_of(layer, x) <= est.upper


def test_looser_tolerances_stop_earlier():
    operator = rotated(spectrum("flat", 200), 200, 200, seed=0)
    steps = [solve(operator, tol=tol)[0].steps for tol in (0.3, 1e-1, 1e-2, 1e-4)]
    assert steps == sorted(set(steps))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_batch_equals_loop(seed: int):
    """Items leave one after the other; what one does to its own basis is no concern of the next."""
    operator = mixed()
    together = solve(operator, seed=seed)
    assert len({s.steps for s in together}) > 2
    for item, solution in enumerate(together):
        (alone,) = solve(operator.select(torch.tensor([item])), seed=seed)
        assert solution.steps == alone.steps
        assert solution.value == pytest.approx(alone.value, rel=1e-12, abs=1e-300)
        assert solution.upper == pytest.approx(alone.upper, rel=1e-6, abs=1e-300)
        assert attained(operator, solution, item) == pytest.approx(solution.value, rel=1e-6, abs=1e-300)


def test_arrays_shrink_as_items_leave(monkeypatch: pytest.MonkeyPatch):
    served = []
    gram = Matrix.gram
    monkeypatch.setattr(Matrix, "gram", lambda self, v: served.append(self.batch) or gram(self, v))
    steps = [s.steps for s in solve(mixed(names=("rank one", "flat", "zero", "slow", "isolated")))]
    assert len(served) == max(steps)
    size = len(steps)
    for step, batch in enumerate(served):
        left = sum(s > step for s in steps)
        size = left if left <= size // 2 else size
        assert batch == size
    assert served[0] == 5
    assert served[-1] <= 2


def test_batch_of_attention_equals_loop():
    layer, _ = attention(20, 6, seed=2, heads=2, gain=3.0)
    x = torch.randn(5, 20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x * torch.tensor([0.01, 0.3, 1.0, 2.0, 5.0])[:, None, None]
    together = hs.lipschitz_batch(layer, x, tol=1e-6, solver=GolubKahan())
    assert len(set(together.steps)) > 1
    for item, est in enumerate(together):
        alone = hs.lipschitz(layer, x[item], tol=1e-6, solver=GolubKahan())
        assert (est.steps, est.status) == (alone.steps, alone.status)
        assert est.value == pytest.approx(alone.value, rel=1e-12)
        assert est.upper == pytest.approx(alone.upper, rel=1e-6)


def test_batch_with_masks_equals_loop():
    layer, _ = attention(10, 4, seed=2)
    x = torch.randn(3, 10, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    real = torch.arange(10) < torch.tensor([[3], [10], [1]])
    layer = hs.Attention(layer.w_q, layer.w_k, layer.w_v, layer.w_o, attention_mask=real)
    for item, est in enumerate(hs.lipschitz_batch(layer, x, tol=1e-8, solver=GolubKahan())):
        bare = hs.Attention(layer.w_q, layer.w_k, layer.w_v, layer.w_o)
        assert est.value == pytest.approx(norm_of(bare, x[item, real[item]]), rel=1e-7)


def test_a_seed_is_an_answer():
    layer, x = attention(40, 8, seed=1, dtype=torch.float32)
    first, again = (hs.lipschitz(layer, x, seed=5) for _ in range(2))
    assert first.to_dict() == again.to_dict()
    assert torch.equal(first.direction, again.direction)
    others = [hs.lipschitz(layer, x, seed=s) for s in range(6, 12)]
    assert len({e.lower for e in others}) > 1
    assert all(e.value == pytest.approx(first.value, rel=1e-3) for e in others)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[golub_kahan._Iteration]:
    """Every run from here on, so that its basis and its `T` can be looked at."""
    runs, start = [], golub_kahan._Iteration._start
    monkeypatch.setattr(golub_kahan._Iteration, "_start", lambda self: runs.append(self) or start(self))
    return runs


def test_steps_keep_one_vector_each(monkeypatch: pytest.MonkeyPatch):
    runs, n = watched(monkeypatch), 200
    (solution,) = solve(rotated(spectrum("flat", n), n, n, seed=0))
    (run,) = runs
    assert run.basis.count == solution.steps
    kept = torch.cat(run.basis.chunks, 1)[0]
    assert kept.shape == (solution.steps, n)
    assert float((kept @ kept.mT - torch.eye(len(kept))).abs().max()) < 1e-12
    room = run.basis.room * len(run.basis.chunks)
    assert room - run.basis.count < CHUNK


def test_krylov_identity(monkeypatch: pytest.MonkeyPatch):
    """`T = QᵀMQ`, in the batch whose neighbours close their spaces too."""
    runs = watched(monkeypatch)
    for seed in range(6):
        operator = mixed(names=("near-invariant", "rank one", "flat", "slow", "equal"))
        solve(operator, seed=seed)
        run = runs.pop()
        kept = torch.cat(run.basis.chunks, 1)
        image = kept @ operator.matrix[run.items].mT
        beside = run.beta[:, :-1]
        T = run.alpha.diag_embed() + beside.diag_embed(1) + beside.diag_embed(-1)
        assert float((image @ image.mT - T).abs().max()) < 1e-10


BIG = 786_432


def big(name: str) -> Diagonal:
    return Diagonal(spectrum(name, BIG).float()[torch.randperm(BIG, generator=torch.Generator().manual_seed(0))][None])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "certify", "most"),
    [
        ("square root", 0.02, 75),
        ("flat", 0.02, 75),
        ("isolated", 0.02, 75),
        ("isolated", 0.005, 75),
        ("square root", 0.005, 140),
    ],
)
def test_certificate_at_full_size(name: str, certify: float, most: int):
    (solution,) = solve(big(name), tol=1e-3, certify=certify)
    assert solution.upper <= solution.value * (1 + certify)
    assert solution.value * (1 - 1e-5) <= 1.0 <= solution.upper
    assert solution.steps <= most


def test_a_basis_turned_round_changes_nothing_but_rounding():
    """The norm is the same in every orthogonal basis."""
    matrix = rotated(spectrum("clustered", 50), 50, 50, seed=1).matrix
    turned = orthogonal(50, 8) @ matrix @ orthogonal(50, 9)
    assert solve(Matrix(turned))[0].value == pytest.approx(solve(Matrix(matrix))[0].value, rel=1e-8)
