"""Attacks: the singular direction realises `L ε`, nothing realises more, splitting is the mean field's second term."""

import math

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import BadFunctionError, BadInputError
from howsmooth.search.attacks import METHODS, Attack, Attacks, attack
from problems.layers import gaussian


def layer(causal: bool = False, heads: int = 2) -> hs.Attention:
    w_q, w_k, w_v, w_o = (gaussian(8, 8, seed=s) / 8**0.5 for s in range(4))
    return hs.Attention(2 * w_q, w_k, w_v, w_o, heads=heads, causal=causal)


def block() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


def row_of(rows: Attacks, method: str, epsilon: float) -> Attack:
    """The one attack of that method at that budget."""
    (row,) = [row for row in rows if (row.method, row.epsilon) == (method, epsilon)]
    return row


FUNCTIONS = {
    "layer": layer(),
    "causal layer": layer(causal=True),
    "pre-norm": layer() @ hs.LayerNorm(gaussian(8, seed=5)),
    "block": block(),
    "pooled": lambda x: torch.tanh(x).square().mean(-2),
}
SMALL = 1e-6


@pytest.mark.parametrize("name", FUNCTIONS)
def test_first_order(name):
    """At a small budget the singular direction realises `L ε`, and no attack more."""
    x = gaussian(6, 8, seed=9, dtype=torch.float32)
    found = attack(FUNCTIONS[name], x, SMALL)
    assert [row.method for row in found] == list(METHODS)
    for method in ("singular", "relinearised"):
        assert 0.98 <= (row_of(found, method, SMALL).share or 0.0) <= 1.001
    for row in found:
        if name == "pooled" and row.method == "splitting":  # a mean over tokens of a function of each
            assert row.gain is None
            assert "nothing to first order" in row.note
            continue
        assert row.moved == pytest.approx(SMALL)
        assert row.share is not None
        assert 0 < row.share <= 1.001
        if row.method == "splitting":
            assert row.share >= 0.98
        else:
            assert row.predicted == found.estimate.value


@pytest.mark.parametrize("name", ["layer", "block"])
def test_larger_budgets(name):
    x = gaussian(6, 8, seed=9)
    found = attack(FUNCTIONS[name], x, [0.01, 0.3, 3.0], steps=6)
    for epsilon in (0.01, 0.3, 3.0):
        gains = {row.method: row.gain or 0.0 for row in found if row.epsilon == epsilon}
        assert gains["relinearised"] >= gains["singular"] * (1 - 1e-12)
        assert gains["projected gradient"] > gains["noise"]
    row = row_of(found, "relinearised", 0.3)
    assert row.calls == row_of(found, "projected gradient", 0.3).calls == row_of(found, "noise", 0.3).calls
    assert row.perturbation is not None
    f = FUNCTIONS[name]
    f = f.double() if isinstance(f, torch.nn.Module) else f
    with torch.no_grad():
        change = (f(x + row.perturbation) - f(x)).norm()
    assert float(change) == pytest.approx(row.change, rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_splitting_is_the_second_term_of_the_mean_field_constant(seed):
    """`max_i ‖V C_i A‖₂` (docs/explanation/theory.md): two halves of one token move apart."""
    A, V, x = 2 * gaussian(3, 3, seed=seed), gaussian(3, 3, seed=seed + 10), gaussian(5, 3, seed=seed + 20)
    attn = hs.Attention.from_matrices(A, V)
    p = torch.softmax((x @ A.mT) @ x.mT, -1)
    spread = x[None] - (p @ x)[:, None]  # (i, j, d)
    C = torch.einsum("ij,ijk,ijl->ikl", p, spread, spread)
    truth = float(torch.linalg.matrix_norm(V @ C @ A, 2).max())
    row = attack(attn, x, 1e-5, methods=["splitting"])[0]
    assert row.predicted == pytest.approx(truth, rel=1e-3)
    assert row.gain == pytest.approx(truth, rel=1e-3)
    token = int(torch.linalg.matrix_norm(V @ C @ A, 2).argmax())
    assert row.note == f"token {token}"


def test_splitting_that_cannot_be_done_is_marked():
    order = attack(layer(causal=True), gaussian(4, 8, seed=1), 1e-3, methods=["splitting"])[0]
    assert "order matters" in order.note
    fixed = attack(lambda x: torch.tanh(x) * torch.arange(1.0, 5.0)[:, None], gaussian(4, 2, seed=1), 1e-3)
    row = row_of(fixed, "splitting", 1e-3)
    assert (row.gain, row.share, row.change) == (None, None, None)
    assert "twice as many tokens" in row.note
    assert row_of(fixed, "singular", 1e-3).share == pytest.approx(1.0, abs=0.02)
    flat = row_of(attack(lambda x: torch.tanh(x), gaussian(4, seed=1), 1e-3), "splitting", 1e-3)
    assert "sequence of tokens" in flat.note
    assert "splitting" in str(fixed)


def test_an_output_that_leaves_the_range_is_marked_and_the_rest_kept():
    found = attack(lambda x: torch.exp(x), torch.full((1, 2), 700.0, dtype=torch.float64), [1e-3, 50.0], methods=["singular"])
    near, far = found
    assert near.gain is not None
    assert far.gain is not None  # the other sign stays finite
    lost = attack(lambda x: torch.exp(x.square()), torch.full((1, 2), 26.0).double(), [1e-3, 60.0], methods=["singular"])
    assert lost[0].gain is not None
    assert lost[1].gain is None
    assert "not finite" in lost[1].note
    assert "–" in str(lost)
    assert lost.to_dict()["attacks"][1]["gain"] is None


def test_same_seed_same_answer_whatever_else_is_asked():
    x = gaussian(5, 8, seed=2)
    whole, alone = attack(layer(), x, 0.1), attack(layer(), x, 0.1, methods=["projected gradient"])
    assert row_of(whole, "projected gradient", 0.1).change == alone[0].change


def test_default_budgets_follow_the_input():
    x = 100 * gaussian(5, 8, seed=2)
    budgets = [row.epsilon for row in attack(layer(), x, methods=["singular"])]
    assert budgets == pytest.approx([float(x.norm()) * s for s in (1e-4, 1e-2, 1e-1)])


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf, [1e-3, 0.0]])
def test_budgets_out_of_range(epsilon):
    with pytest.raises(BadInputError, match="epsilon > 0"):
        attack(layer(), gaussian(4, 8, seed=0), epsilon)


def test_bad_input():
    x = gaussian(4, 8, seed=0)
    with pytest.raises(BadInputError, match="rounds the change away"):
        attack(layer(), x, 1e-15)
    with pytest.raises(BadInputError, match="methods among"):
        attack(layer(), x, 0.1, methods=["magic"])
    with pytest.raises(BadInputError, match="at least 1"):
        attack(layer(), x, 0.1, steps=0)
    with pytest.raises(BadInputError, match="floating-point tensor"):
        attack(layer(), torch.zeros(3, 8, dtype=torch.long), 0.1)
    with pytest.raises(BadFunctionError, match="finite output"):
        attack(lambda t: t / 0, x, 0.1)
