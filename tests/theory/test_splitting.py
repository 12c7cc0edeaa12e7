"""Moving against splitting, for maps and for any function of tokens."""

import dataclasses
import json
import math

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import BadFunctionError, BadInputError
from howsmooth.theory import splitting as decide
from problems.layers import gaussian, turned
from problems.measures import KINDS, layer, make, random_measure

UNMASKED = [k for k in KINDS if k not in ("causal", "rms norm")]
MINUS = hs.Attention.from_matrices(-torch.eye(1).double(), torch.eye(1).double())
FAR = hs.Measure(torch.tensor([[0.0], [4.0]]).double(), torch.tensor([15 / 16, 1 / 16]))


def test_a_measure_that_splits():
    s = hs.splitting(MINUS, FAR)
    assert s.pays
    assert s.certain
    assert s.confidence == 1
    assert s.token == 0
    assert s.direction.abs().tolist() == [1.0]
    assert s.gain == pytest.approx(15**1.5 / 16, rel=1e-5)
    assert s.split.split
    assert not s.moved.split
    assert str(s).startswith("splitting pays: token 0")
    assert json.loads(json.dumps(s.to_dict())) == s.to_dict()


def test_equal_atoms_are_one():
    assert hs.splitting(MINUS, FAR.split(parts=3)).gain == pytest.approx(hs.splitting(MINUS, FAR).gain, rel=1e-9)


def test_equal_tokens_part_as_they_are():
    tokens = torch.zeros(16, 1).double()
    tokens[0] = 4.0
    s = hs.splitting(MINUS, tokens)
    assert not s.pays
    assert s.gain == pytest.approx(1)


@pytest.mark.parametrize("kind", UNMASKED)
@pytest.mark.parametrize("seed", range(3))
def test_a_function_equals_the_map(kind, seed):
    f, x = make(kind, 100 * seed), gaussian(4, 3, seed=seed)
    ours, traced = hs.splitting(f, x), hs.splitting(lambda z: f(z), x)
    assert traced.gain == pytest.approx(ours.gain, rel=1e-9)
    assert traced.moved.value == pytest.approx(ours.moved.value, rel=1e-9)
    assert traced.token == ours.token
    assert traced.norms.tolist() == pytest.approx(ours.norms.tolist(), rel=1e-8)
    assert float((traced.direction @ ours.direction).abs()) == pytest.approx(1, rel=1e-6)
    assert traced.pays == ours.pays


def test_a_function_too_large_for_its_blocks(monkeypatch):
    monkeypatch.setattr(decide, "_BLOCKS", 0)
    f, x = make("plain", 0), gaussian(4, 3, seed=0)
    ours, traced = hs.splitting(f, x), hs.splitting(lambda z: f(z), x, tol=1e-8)
    assert traced.split.value == pytest.approx(ours.split.value, rel=1e-6)
    assert traced.token == ours.token
    assert bool((traced.norms <= ours.norms * (1 + 1e-9)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_measures_agree(kind):
    f, x = make(kind, 0), gaussian(5, 3, seed=0)
    tokens, measure = hs.splitting(f, x), hs.splitting(f, hs.Measure.from_tokens(x, causal=True))
    assert tokens.gain == pytest.approx(measure.gain, rel=1e-9)


@pytest.mark.parametrize("module", [nn.Linear(3, 2), nn.LayerNorm(3), nn.GELU()], ids=lambda m: type(m).__name__)
def test_maps_token_by_token_never_split(module):
    s = hs.splitting(module, gaussian(5, 3, seed=0))
    assert s.gain == pytest.approx(1, rel=1e-9)
    assert not s.pays


def test_a_norm_of_ours_never_splits():
    s = hs.splitting(hs.RMSNorm(torch.ones(3).double()), gaussian(5, 3, seed=0))
    assert s.gain == pytest.approx(1, rel=1e-12)
    assert not s.pays
    assert s.certain


def test_a_whole_block():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True).eval()
    s = hs.splitting(block, torch.randn(5, 8))
    assert s.moved.precision == s.split.precision == "float64"
    assert 0 < s.gain < 10


def test_one_token_against_its_mean():
    """`x − mean x` does nothing to one token and everything to its halves."""
    s = hs.splitting(lambda x: x - x.mean(0), gaussian(1, 3, seed=0))
    assert s.moved.value == 0
    assert s.split.value == pytest.approx(1)
    assert math.isinf(s.gain)
    assert s.pays
    assert s.to_dict()["gain"] is None


def test_sums_are_compared_at_the_doubled_input():
    """Sums grow with the number of tokens, both parts of them alike."""
    x, w = gaussian(3, 2, seed=0), gaussian(2, 2, seed=1)

    def sums(z: Tensor) -> Tensor:
        return torch.tanh(z @ w @ z.mT) @ z

    halved = hs.splitting(lambda z: sums(z) / len(z), x)
    assert hs.splitting(sums, x).gain == pytest.approx(halved.gain, rel=1e-9)


def test_certain_needs_intervals_apart():
    s = hs.splitting(layer(0), gaussian(40, 3, seed=0), solver=hs.GolubKahan(max_steps=2))
    assert s.moved.upper > s.moved.lower
    if s.split.lower < s.moved.upper and s.split.upper > s.moved.lower:
        assert not s.certain
        assert "not certain" in str(s)
    tight = hs.splitting(layer(0), gaussian(40, 3, seed=0))
    assert tight.certain


def test_wide_layers_go_through_products(monkeypatch):
    monkeypatch.setattr("howsmooth.theory.blocks.SMALL", 0)
    f, x = make("grouped", 0), gaussian(5, 3, seed=0)
    s = hs.splitting(f, x)
    assert s.split.confidence == pytest.approx(1 - 1e-6)
    assert s.confidence < 1
    assert s.split.status in ("certified", "converged")


def test_a_function_in_single_precision():
    weight = gaussian(3, 3, seed=0).float()
    x = gaussian(4, 3, seed=1).float()

    def f(z: Tensor) -> Tensor:
        return torch.softmax(z @ weight @ z.mT, -1) @ z

    s = hs.splitting(f, x)
    assert s.split.precision == "float32"
    exact = hs.splitting(lambda z: torch.softmax(z @ weight.double() @ z.mT, -1) @ z, x)  # takes float64 as it is
    assert exact.split.precision == "float64"
    assert s.gain == pytest.approx(exact.gain, rel=1e-4)


BAD = {
    "a sequence map": (lambda x: x.cumsum(0), gaussian(3, 2, seed=0)),
    "positions": (lambda x: x + torch.arange(len(x)).double()[:, None], gaussian(3, 2, seed=0)),
    "one row": (lambda x: x.mean(0, keepdim=True), gaussian(3, 2, seed=0)),
    "a number": (lambda x: x.sum(), gaussian(3, 2, seed=0)),
    "a tuple": (lambda x: (x, x), gaussian(3, 2, seed=0)),
    "a causal layer as a function": (lambda x: layer(0, causal=True)(x), gaussian(3, 3, seed=0)),
    "dropout": (nn.Dropout(0.5).train(), gaussian(3, 2, seed=0)),
    "a batch": (layer(0), gaussian(2, 3, 3, seed=0)),
    "no function": ("attention", gaussian(3, 3, seed=0)),
    "a function and a measure": (torch.sin, random_measure(3, 0)),
    "a window and a measure": (layer(0, window=2), random_measure(3, 0)),
    "phases and a measure": (layer(0, rotary=hs.Rotary.from_base(2, 3)), random_measure(3, 0)),
    "nan": (layer(0), float("nan") * gaussian(3, 3, seed=0)),
    "integers": (layer(0), torch.ones(3, 3).long()),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_in_one_sentence(name):
    f, x = BAD[name]
    with pytest.raises((BadInputError, BadFunctionError), match=r"^expected [^\n]* got [^\n]*[^.]$"):
        hs.splitting(f, x)


@pytest.mark.parametrize("f", [layer(0), torch.sin], ids=["map", "function"])
def test_options_are_checked(f):
    with pytest.raises(BadInputError, match=r"^expected 0 < tol < 1, got -1"):
        hs.splitting(f, gaussian(3, 3, seed=0), tol=-1.0)


@pytest.mark.parametrize("kinds", [(0, 0, 1), (1, 2, 0), (3, 3, 1)], ids=str)
def test_tokens_of_a_sequence_keep_their_places(kinds):
    """Two halves of one token at its own place, under the same mask and phases, on a sequence written out twice."""
    n, d = 5, 3
    plain = layer(4, d, heads=2, causal=True, window=3)
    attn = turned(plain, n, q=kinds[0], k=kinds[1], phases=kinds[2], seed=0)
    x = gaussian(n, d, seed=2)
    s = hs.splitting(attn, x)
    assert s.moved.value == pytest.approx(hs.lipschitz(attn, x).value, rel=1e-9)

    # every token written twice, side by side; both copies see what one saw, as a bias that hides the rest says
    near = torch.arange(n).repeat_interleave(2)
    apart = near[:, None] - near[None]
    bias = torch.zeros(1, 1, 2 * n, 2 * n).double().masked_fill((apart < 0) | (apart >= 3), -torch.inf)
    rotary = None if attn.rotary is None else hs.Rotary(attn.rotary.cos[near], attn.rotary.sin[near])
    doubled = dataclasses.replace(attn, causal=False, window=None, bias=bias, rotary=rotary)
    signs = torch.tensor([1.0, -1.0]).double().repeat(n)[:, None]
    J = torch.func.jacrev(lambda e: doubled(x[near] + signs * e[near])[::2])(torch.zeros_like(x))
    assert isinstance(J, Tensor)
    blocks = J[torch.arange(n), :, torch.arange(n)]  # (n, d_out, d)
    assert float(J.norm()) == pytest.approx(float(blocks.norm()), rel=1e-12)
    assert s.norms.tolist() == pytest.approx(torch.linalg.matrix_norm(blocks, 2).tolist(), rel=1e-9)


def test_equivariance_is_what_is_refused():
    with pytest.raises(BadFunctionError, match="commutes with permutations"):
        hs.splitting(*BAD["a sequence map"])
