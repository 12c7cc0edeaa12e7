"""Growth over depth: all numbers are those of dense Jacobians, and a random model with norms in front grows by a power."""

import itertools
import math

import pytest
import torch
import transformers as t
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import BadFunctionError, BadInputError, NoConvergenceError
from howsmooth.models.depth import blocks, random_directions, stretches
from problems.spectra import Matrix
from problems.zoo import randomize

IDS = [3, 1, 4, 1, 5]
LAYERS = 4


@pytest.fixture(scope="module")
def model() -> hs.Model:
    config = t.GPT2Config(vocab_size=12, n_embd=8, n_layer=LAYERS, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0)
    return hs.load(randomize(t.GPT2Model(config)).double())


def dense_blocks(model: hs.Model, map: str = "block") -> list[Tensor]:
    captured = model.capture(ids=IDS)
    return [hs.jacobian(captured.map(k, map), captured.tokens(k, map)).dense() for k in range(LAYERS)]  # pyright: ignore


def product(matrices: list[Tensor]) -> Tensor:
    whole = torch.eye(matrices[0].shape[1], dtype=torch.float64)
    for J in matrices:
        whole = J @ whole
    return whole


def test_constants_and_gains_are_those_of_products_of_dense_blocks(model):
    found, dense = model.depth(ids=IDS), dense_blocks(model)
    assert found.layers == found.blocks == tuple(range(LAYERS))
    for k in range(LAYERS):
        for m, J in ((found.to_end[k], product(dense[k:])), (found.from_first[k], product(dense[: k + 1]))):
            assert m.value == pytest.approx(float(torch.linalg.svdvals(J)[0]), rel=1e-9)
            assert float(m.gain or 0) == pytest.approx(float(J.norm()) / math.sqrt(J.shape[1]), rel=1e-9)
    (one,) = [line for line in found.lines() if line["layer"] == 2]
    assert (one["to_end"], one["from_first_gain"]) == (found.to_end[2].value, float(found.from_first[2].gain or 0))


def test_exponents_are_those_of_dense_decompositions_from_the_same_start(model):
    found, dense = model.depth(ids=IDS, k=5), dense_blocks(model)
    sample = model.capture(ids=IDS).sample
    q = random_directions(blocks(sample, 0, LAYERS - 1)[0], 5, found.to_end[0].estimate.seed).flatten(1).mT
    assert torch.allclose(q.mT @ q, torch.eye(5, dtype=torch.float64), atol=1e-12)
    one_go = torch.linalg.qr(product(dense) @ q)[1].diagonal().abs().log() / LAYERS
    assert torch.allclose(found.exponents, one_go, atol=1e-9)
    for J, row in zip(dense, found.stretches, strict=True):
        q, r = torch.linalg.qr(J @ q)
        assert torch.allclose(row, r.diagonal().abs().log(), atol=1e-9)
    sums, most = found.exponents.cumsum(0), torch.linalg.svdvals(product(dense)).log().cumsum(0)[:5] / LAYERS
    assert bool((sums <= most + 1e-9).all())


def test_misalignment_is_that_of_dense_decompositions(model):
    found = model.depth(ids=IDS, k=0, coupling=3, tol=1e-8).misalignments or ()
    updates = dense_blocks(model, "update")
    assert len(found) == LAYERS - 1
    for off, (before, J) in zip(found, itertools.pairwise(updates), strict=True):
        u, _, vh = torch.linalg.svd(before)
        s = torch.linalg.svdvals(J)[:3]
        assert off == pytest.approx(float((u[:, :3].mT @ J @ vh[:3].mT - s.diag()).norm() / s.norm()), rel=1e-6)


MIX = torch.full((2, 2), 0.5)


class Linear(nn.Module):
    """A block `x + M x Wᵀ` of two tokens: attention without logits."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, None]
        return x + nn.functional.scaled_dot_product_attention(0 * h, h, h)[:, 0] @ self.weight.mT


class Stack(nn.Module):
    """Linear blocks, with a way around the first two where `skip` says so."""

    def __init__(self, weights: list[Tensor], skip: bool = False):
        super().__init__()
        self.blocks = nn.ModuleList(Linear(w) for w in weights)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        start = x
        for i, block in enumerate(self.blocks):
            x = block(x) + start if self.skip and i == 1 else block(x)
        return x


def test_blocks_that_share_their_directions_are_aligned_and_others_are_not():
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randn(6, 6, generator=random, dtype=torch.float64) for _ in range(2))
    x = torch.randn(1, 2, 6, generator=random, dtype=torch.float64)
    same, other = hs.load(Stack([a, 2 * a, b])).depth(inputs=x, k=2, coupling=2).misalignments or (1.0, 0.0)
    assert same == pytest.approx(0, abs=1e-6)
    assert other > 0.5


def test_a_way_around_blocks_is_refused_for_exponents_alone():
    random = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, 4, generator=random, dtype=torch.float64) for _ in range(3)]
    x = torch.randn(1, 2, 4, generator=random, dtype=torch.float64)
    model = hs.load(Stack(weights, skip=True))
    with pytest.raises(BadFunctionError, match=r"blocks of one stream that follow each other.*pass k=0"):
        model.depth(inputs=x)
    a, b, c = (torch.eye(8, dtype=torch.float64) + torch.kron(MIX.double(), w) for w in weights)
    whole = c @ (b @ a + torch.eye(8, dtype=torch.float64))
    found = model.depth(inputs=x, k=0)
    assert found.to_end[0].value == pytest.approx(float(torch.linalg.svdvals(whole)[0]), rel=1e-9)
    assert found.exponents.numel() == 0
    assert "Lyapunov" not in str(found)


def test_directions_beyond_the_rank_are_said_to_shrink_to_nothing():
    random = torch.Generator().manual_seed(0)
    low = torch.randn(1, 4, 2, generator=random, dtype=torch.float64) @ torch.randn(
        1, 2, 4, generator=random, dtype=torch.float64
    )
    start = torch.linalg.qr(torch.randn(4, 3, generator=random, dtype=torch.float64))[0].mT
    (found,) = stretches([Matrix(low)], start)
    assert bool(found[:2].isfinite().all())
    assert float(found[2]) == -math.inf
    with pytest.raises(NoConvergenceError, match="NaN or infinity"):
        list(stretches([Matrix(torch.full((1, 4, 4), math.nan, dtype=torch.float64))], start))


def test_layers_and_an_earlier_end(model):
    dense = dense_blocks(model)
    found = model.depth(ids=IDS, layers=[1, 2], to=2, k=2)
    assert (found.layers, found.blocks) == ((1, 2), (1, 2))
    assert found.from_first[0].value == pytest.approx(float(torch.linalg.svdvals(dense[1])[0]), rel=1e-9)
    assert found.to_end[0].value == pytest.approx(float(torch.linalg.svdvals(dense[2] @ dense[1])[0]), rel=1e-9)
    assert found.stretches.shape == (2, 2)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"layers": [3], "to": 1}, r"expected layers up to 1, where the maps end, got \[3\]"),
        ({"layers": []}, "expected layers up to 3"),
        ({"to": "logits"}, 'measure\\(layer, to="logits"\\)'),
        ({"to": 9}, "layer from 0 to 3"),
        ({"k": 41}, "expected k up to 40"),
        ({"coupling": 0}, "coupling=None"),
        ({"layer": [0]}, "got 'layer'; did you mean"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(model, how, said):
    with pytest.raises(BadInputError, match=said):
        model.depth(ids=IDS, **how)


def test_a_table_a_dictionary_and_a_figure(model):
    found = model.depth(ids=IDS, coupling=2, tol=1e-2)
    assert list(found.to_frame().columns)[:3] == ["layer", "to_end", "to_end_gain"]
    assert found.to_frame()["misalignment"].isna().tolist() == [False] * (LAYERS - 1) + [True]
    plain = found.to_dict()
    assert plain["exponents"] == found.exponents.tolist()
    assert len(plain["to_end"]) == LAYERS
    assert "Lyapunov exponents over 4 blocks" in str(found)
    assert len(found.plot().lines) == 4


def slopes(captured: hs.Capture, lengths: tuple[int, ...] = (4, 8, 16)) -> Tensor:
    """Of `log gain²` over `log blocks`, from 4 to 8 blocks and from 8 to 16."""
    logs = torch.tensor([2 * math.log(float(captured.measure(0, to=n - 1, gain=True, tol=0.1).gain or 0)) for n in lengths])
    return logs.diff() / math.log(2)


@pytest.mark.slow
def test_a_random_model_that_normalises_first_grows_by_a_power_of_its_depth():
    """The mean of gain² over weights, APJN, is a power of the depth (arXiv 2604.11890); without norms it is exponential.

    From one pair of depths to the next the slope in logarithms stays for a power, and doubles for an exponential.
    """
    config = t.GPT2Config(vocab_size=12, n_embd=32, n_layer=16, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0)
    config.initializer_range = 32**-0.5
    found = {"norms": torch.zeros(2), "no norms": torch.zeros(2)}
    for seed in range(2):
        torch.manual_seed(seed)
        model, plain = (
            hs.load(t.GPT2Model(config).eval()),
            hs.load(Stack([0.3 * torch.randn(32, 32) / 32**0.5 for _ in range(16)])),
        )
        found["norms"] += slopes(model.capture(inputs_embeds=0.02 * torch.randn(1, 2, 32))) / 2
        found["no norms"] += slopes(plain.capture(inputs=torch.randn(1, 2, 32))) / 2
    (a, b), (c, d) = found["norms"].tolist(), found["no norms"].tolist()
    assert 0.5**0.5 < b / a < 2**0.5
    assert d / c > 2**0.5
