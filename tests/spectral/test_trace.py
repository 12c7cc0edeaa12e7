"""The mean gain: its interval holds as often as it says, and is that of the whole spectrum where that is at hand."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.spectral import Estimate, GaussianProbes, probed_gains
from problems.layers import random_layer
from problems.spectra import SPECTRA, shuffled, spectrum

BATCH, SIZE = 60, 300


def misses(name: str, probes: GaussianProbes, seed: int, *, upper: float = 1.0) -> int:
    """How many intervals of one spectrum in many orders miss its Frobenius norm. upper: that the largest value is given."""
    operator = shuffled(spectrum(name, SIZE), BATCH, seed)
    places = operator.values.argmax(-1)
    directions = torch.nn.functional.one_hot(places, SIZE).double()
    value = float(operator.values[0].amax())
    top = Estimate(value, value, value * upper, 1.0, "certified", directions[0], 1, "float64", 1e-3, seed)
    gains = probed_gains(operator, [top] * BATCH, directions, probes, [0.0] * BATCH)
    truth = float(spectrum(name, SIZE).norm()) / math.sqrt(SIZE)
    room = 1e-12 * truth
    return sum(g.lower is None or g.upper is None or not g.lower - room <= truth <= g.upper + room for g in gains)


@pytest.mark.parametrize("confidence", [0.5, 0.95])
@pytest.mark.parametrize("name", SPECTRA)
def test_interval_fails_no_more_often_than_it_says(name: str, confidence: float):
    """Four standard deviations over the mean are allowed."""
    runs = list(itertools.product((1, 4, 16), range(2)))
    failed = sum(misses(name, GaussianProbes(count, confidence), seed) for count, seed in runs)
    trials, risk = BATCH * len(runs), 1 - confidence
    assert failed <= trials * risk + 4 * math.sqrt(trials * risk * (1 - risk))


def test_an_upper_end_that_is_too_small_shows():
    assert misses("flat", GaussianProbes(16, 0.95), 0, upper=0.01) > 0.5 * BATCH


def test_a_small_jacobian_is_decomposed():
    layer, x = random_layer(3, n=4, width=6)
    sigma = torch.linalg.svdvals(hs.jacobian(layer, x).dense().double())
    found, share = hs.gain(layer, x), sigma.square() / sigma.square().sum()
    assert found.value == pytest.approx(float(sigma.norm()) / 24**0.5)
    assert found.stable_rank == pytest.approx(float(1 / share[0]))
    assert found.effective_rank == pytest.approx(math.exp(float(torch.special.entr(share).sum())))
    assert (found.confidence, found.probes) == (1.0, 0)
    assert found.note == "The Jacobian was formed and decomposed, so both ends are exact to rounding."


def test_probes_are_random_and_repeat():
    layer, x = random_layer(5, n=12, width=32)
    truth = float(hs.jacobian(layer, x).dense().double().norm()) / 384**0.5
    found = hs.gain(layer, x, probes=32)
    assert found.lower is not None
    assert found.upper is not None
    assert found.lower <= truth <= found.upper
    assert hs.gain(layer, x, probes=32) == found != hs.gain(layer, x, probes=32, seed=1)
    assert found.note.startswith("The interval comes from 32 random probes")
    moved = hs.gain(layer, x, tokens=[3, 4, 5, 6, 7, 8, 9, 10, 11], probes=64)
    columns = hs.jacobian(layer, x).dense().double().unflatten(1, (12, 32))[:, 3:]
    assert moved.value == pytest.approx(float(columns.norm()) / (9 * 32) ** 0.5, rel=0.3)


def test_without_an_upper_end_there_is_a_value_alone():
    operator = shuffled(spectrum("flat", SIZE), 1, 0)
    top = hs.lipschitz(lambda x: operator.values[0] * x, torch.ones(SIZE, dtype=torch.float64))
    (found,) = probed_gains(operator, [replace(top, upper=math.inf)], top.direction[None], GaussianProbes(), [0.0])
    assert (found.lower, found.upper, found.confidence) == (None, None, None)
    assert str(found) == f"{found.value:.6g} (stable rank {found.stable_rank:.4g}, 16 probes)"
    assert found.to_dict()["note"].endswith("certify=0.1 asks for one.")


def test_sizes_far_from_one_keep_their_digits():
    layer, x = random_layer(5, n=12, width=32)
    one = hs.gain(layer, x, seed=0)
    for size in (1e-150, 1e-30, 1e30, 1e150):
        scaled = hs.gain(lambda t, size=size: size * layer(t), x.double(), seed=0)
        assert scaled.value == pytest.approx(size * one.value, rel=0.2)
        assert scaled.stable_rank == pytest.approx(one.stable_rank, rel=0.4)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"probes": 0}, "expected a whole number of probes ≥ 1, got 0"),
        ({"confidence": 1}, "expected 0 < confidence < 1, got 1"),
        ({"confidence": 1 - 1e-7}, "expected a confidence below 0.999999, got 0.9999999"),
    ],
)
def test_what_no_interval_can_be_made_of_is_refused(wrong, said):
    layer, x = random_layer(5, n=12, width=32)
    with pytest.raises(BadInputError, match=said):
        hs.gain(layer, x, **wrong)


def test_a_measure_has_no_gain():
    layer, x = random_layer(3, n=4, width=6)
    wrong: dict = {"f": layer, "x": hs.Measure(x)}
    with pytest.raises(BadInputError, match="expected one input as a tensor, got a measure"):
        hs.gain(**wrong)


def test_a_layer_of_a_model_beside_its_constant():
    model = hs.load("demo", device="cpu")
    one = model.measure("A cat sat.", 3, gain=True)
    assert one.gain is not None
    assert one.gain.upper is not None
    assert one.lower / 1536**0.5 <= one.gain.value <= one.gain.upper <= one.upper
    assert one.to_dict()["gain"]["stable_rank"] == one.gain.stable_rank
    assert model.measure("A cat sat.", 3).gain is None
    capture = model.capture(windows=["A cat sat.", "A dog ran."])
    both = capture.measure([3], gain=True, heads=True)
    assert [m.gain is not None for m in both] == [True, True]
    with pytest.raises(BadInputError, match="expected none of heads, closed, gain, k beside within"):
        model.measure("A cat sat.", 3, gain=True, within=0.1)
