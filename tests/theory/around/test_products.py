"""Products whose factors are repeated: gates of tokens, heads, units and of everything, in bounds around an input."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth import verbs
from howsmooth.errors import RefutedBoundError
from howsmooth.program.pieces import PiecesMap
from howsmooth.program.reading import read_function
from howsmooth.solve import Options
from howsmooth.theory.around import Around, Certified, Neighbourhood, around_graph, pieces
from howsmooth.theory.around.pieces import shared_shape, slice_lengths
from howsmooth.theory.upper import Upper
from howsmooth.verbs import solve_near
from problems.gates import SHAPES, gated
from problems.layers import gaussian
from problems.small_functions import Looked, examine

PAIRS = [
    *[((3, 4), b) for b in ((3, 4), (3, 1), (1, 4), (4,), (1,), (), (3, 1, 4))],
    *[((), ()), ((1,), (3, 1)), ((1, 3), (2, 1)), ((2, 3, 1), (2, 1, 4)), ((2, 3, 4), (3, 1)), ((2, 1, 1), (1, 3, 4))],
]


@pytest.mark.parametrize("shapes", PAIRS, ids=str)
def test_the_change_of_a_product_is_as_large_as_the_lemma_says(shapes: tuple[tuple[int, ...], tuple[int, ...]]):
    """The norm of `(u, v) ↦ u Δb + Δa v`, formed as a matrix."""
    da, db = (gaussian(*shape, seed=i) if shape else gaussian(1, seed=i)[0] for i, shape in enumerate(shapes))
    u, v = torch.zeros_like(da), torch.zeros_like(db)
    parts = torch.autograd.functional.jacobian(lambda u, v: u * db + da * v, (u, v))
    whole = torch.cat([part.reshape((da * db).numel(), -1) for part in parts], 1)  # pyright: ignore
    shared = shared_shape(*shapes)
    alpha, beta = (slice_lengths(Upper(t.abs()), shared).value for t in (da, db))
    assert float(torch.linalg.matrix_norm(whole, 2)) == pytest.approx(float(torch.hypot(alpha, beta).max()), rel=1e-12)
    assert float((da * db).norm()) == pytest.approx(float((alpha * beta).norm()), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_no_point_is_above_a_bound(shape: str):
    looked = Looked()
    for seed in (17, 19):  # linear gates and squares, of units that are alike and vanish at the input
        examine(gated(seed, shape), looked, lower=False)
    assert looked.points == 2 * 3 * 7
    assert looked.wrong == []


@pytest.mark.slow
@pytest.mark.weekly
def test_no_point_is_above_a_bound_in_many():
    looked = Looked()
    for seed in range(60):
        examine(gated(seed), looked, lower=seed % 10 == 0)
    assert looked.functions == 60
    assert looked.wrong == []


def test_the_points_refute_a_constant_entry_by_entry(monkeypatch: pytest.MonkeyPatch):
    """What a product without repetition needs is too small where a gate of a token meets many units."""
    monkeypatch.setattr(pieces, "slice_lengths", lambda t, shared: t.map(torch.Tensor.flatten).amax())
    looked = Looked()
    examine(gated(17, "a gate a token"), looked, lower=False)
    assert {why.split()[0] for why in looked.wrong} == {"slope", "change"}


class _Little(nn.Module):
    """Attention of almost nothing, so that a block is a model."""

    def __init__(self):
        super().__init__()
        self.p, self.o = nn.Linear(8, 24), nn.Linear(8, 8)
        for t in self.parameters():
            t.data *= 1e-6

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.p(x).unflatten(-1, (3, 1, 8)).permute(2, 0, 3, 1, 4)
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Gated(nn.Module):
    """64 units along the first direction, and a gate for every token along the same: the input does not show what they do."""

    def __init__(self, gate: Callable[[Tensor], Tensor]):
        super().__init__()
        first, last = torch.eye(8)[:1], torch.diag(torch.eye(8)[-1])
        self.a, self.gate = _Little(), gate
        self.up, self.along = nn.Parameter(first.repeat(64, 1)), nn.Parameter(first.clone())
        self.down, self.beside = nn.Parameter(torch.ones(8, 64) / 512**0.5), nn.Parameter(0.05 * last)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + (x @ self.up.T) * self.gate(x @ self.along.T) @ self.down.T + (x @ self.beside.T) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, None])
@pytest.mark.parametrize("gate", [lambda t: t, lambda t: torch.sigmoid(4 * t) - 0.5], ids=["linear", "sigmoid"])
def test_a_gate_for_every_token_of_a_model(gate: Callable[[Tensor], Tensor], steps: int | None):
    """The largest constant is at least the one at a point near by, where the gate has moved."""
    torch.manual_seed(0)
    block, x = _Gated(gate).eval(), torch.zeros(1, 3, 8)
    x[..., -1] = 0.3
    y = x.double()
    y[..., 0] += 0.1
    J = torch.autograd.functional.jacobian(block.double(), y)
    truth = float(torch.linalg.matrix_norm(J.reshape(24, 24), 2))  # pyright: ignore[reportAttributeAccessIssue]
    found = hs.load(block.float()).measure(inputs=x, layer=0, map="block", within=0.1, steps=steps)
    assert truth > 1.5
    assert found.upper >= truth * (1 - 1e-9)
    assert found.lower <= found.upper <= 6 * truth


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a number of everything": lambda t: t * torch.sigmoid(8 * t.mean()),
    "a matrix of one": lambda t: t * torch.sigmoid(t[:1, :1]),
    "tokens and units": lambda t: t[:, :1] * t.mean(0, keepdim=True),
}


@pytest.mark.parametrize("f", NUMBERS.values(), ids=NUMBERS)
def test_gates_of_many_tokens(f: Callable[[Tensor], Tensor]):
    """Too many entries for a dense decomposition, and factors of one entry."""
    x = gaussian(30, 10, seed=3)
    area = Neighbourhood.of(x, 0.05)
    graph = read_function(f, x)
    around = around_graph(Certified(graph, x), area)
    at = torch.autograd.functional.jacobian(f, x).reshape(300, 300)  # pyright: ignore[reportAttributeAccessIssue]
    step = torch.ones_like(x) / math.sqrt(10)
    for y in (x + 0.05 * step, x - 0.05 * step, x + 0.05 * torch.nn.functional.normalize(gaussian(30, 10, seed=4), dim=-1)):
        J = torch.autograd.functional.jacobian(f, y).reshape(300, 300)  # pyright: ignore[reportAttributeAccessIssue]
        assert float(torch.linalg.matrix_norm(J - at, 2)) <= around.change
        assert float(torch.linalg.matrix_norm(J, 2)) <= around.slope
        assert float((f(y) - f(x)).norm()) <= around.moved_total
    near = solve_near(PiecesMap(graph), area, None, 2, Options())
    assert near.lower <= near.upper == pytest.approx(around.slope, rel=0.05)


def _layer() -> tuple[hs.Attention, Tensor]:
    return hs.Attention.from_matrices(gaussian(3, 3, seed=0), torch.eye(3).double()), gaussian(4, 3, seed=1)


@pytest.mark.parametrize("wrong", [0.5, 1 - 1e-6, math.nan])
def test_a_bound_that_is_refuted_is_an_error(wrong: float, monkeypatch: pytest.MonkeyPatch):
    layer, x = _layer()
    right = verbs.bound_around

    def bound(*args: object, **kwargs: object) -> Around:
        found = right(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        attained = hs.lipschitz(layer, x).lower
        return replace(found, slope=wrong * attained)

    monkeypatch.setattr(verbs, "bound_around", bound)
    with pytest.raises(RefutedBoundError, match=r"^expected an upper end of at least the lower end .* got .* please report it"):
        hs.lipschitz(layer, x, within=1e-3, steps=2)


def test_a_bound_that_is_less_by_rounding_alone_is_none():
    layer, x = _layer()
    norm = hs.lipschitz(layer, x).lower
    around = verbs.bound_around(layer, Neighbourhood.of(x, 0.0))
    assert replace(around, slope=norm * (1 - 1e-12)).upper_end(norm) == norm
    assert replace(around, slope=norm * (1 - 1e-6)).upper_end(norm, noise=1e-5) == norm
    assert around.upper_end(norm) == around.slope >= norm
    with pytest.raises(RefutedBoundError):
        replace(around, slope=norm * (1 - 1e-6)).upper_end(norm)


class _GatedByOne(nn.Module):
    """Hidden units, all gated by the first of them."""

    def __init__(self):
        super().__init__()
        self.a = nn.MultiheadAttention(6, 2, batch_first=True)
        self.up, self.down = nn.Linear(6, 32), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return x + self.a(x, x, x, need_weights=False)[0] + self.down(y * y[..., :1])


def test_units_that_are_gated_by_one_of_them():
    x = torch.randn(1, 3, 6)
    block = _GatedByOne().eval()
    found = hs.load(block).measure(inputs=x, layer=0, map="block", within=0.01, steps=0)
    step = torch.randn(1, 3, 6).double()
    y = x.double() + 0.01 * step / step.norm(dim=-1, keepdim=True)
    J = torch.autograd.functional.jacobian(block.double(), y).reshape(18, 18)  # pyright: ignore[reportAttributeAccessIssue]
    assert float(torch.linalg.matrix_norm(J, 2)) <= found.upper
