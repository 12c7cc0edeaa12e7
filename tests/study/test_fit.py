"""The growth fit: intervals that cover, breaks that are found where they are and nowhere else."""

from itertools import pairwise

import numpy as np
import pytest

from howsmooth.errors import BadInputError
from howsmooth.study.fit import GrowthFit, fit_growth

DOUBLING = (8, 16, 32, 64, 128, 256, 512)
DENSE = (8, 12, 16, 24, 32, 48, 64, 96, 112, 128, 136, 144, 160, 192, 256, 384, 512)
EXPONENT = 0.25
TRIALS = 300


def noise(kind: str, samples: int, lengths: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Errors of log L, (samples, lengths)."""
    shape = samples, len(lengths)
    if kind == "nested":  # windows of one text contain each other: errors walk along, and every text has its own exponent
        own = 0.05 * random.standard_normal((samples, 1)) * np.log(lengths)
        return own + 0.03 * random.standard_normal(shape).cumsum(1)
    if kind == "heavy":
        return 0.1 * random.standard_t(4, shape)
    return 0.1 * random.standard_normal(shape)


def fit(lengths: tuple[int, ...], logs: np.ndarray, **options) -> GrowthFit:
    samples = len(logs)
    return fit_growth(
        lengths * samples, np.exp(logs).ravel().tolist(), np.repeat(range(samples), len(lengths)).tolist(), **options
    )


def trials(lengths: tuple[int, ...], samples: int, kind: str, level: float = 0.95) -> list[GrowthFit]:
    random = np.random.default_rng(2024)
    truth = 1 + EXPONENT * np.log(lengths)
    return [
        fit(lengths, truth + noise(kind, samples, lengths, random), level=level, resamples=1000, seed=t) for t in range(TRIALS)
    ]


def covered(fits: list[GrowthFit], truth: float) -> float:
    return float(np.mean([(f.exponent.low or 0) <= truth <= (f.exponent.high or 0) for f in fits]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "samples", "kind", "method"),
    [
        (DOUBLING, 8, "independent", "samples"),
        (DENSE, 8, "nested", "samples"),
        (DENSE, 8, "heavy", "samples"),
        (DENSE, 5, "independent", "samples"),
        (DOUBLING, 1, "independent", "residuals"),
        (DENSE, 3, "heavy", "residuals"),
    ],
)
def test_intervals_hold_the_true_exponent_as_often_as_they_say(lengths, samples, kind, method):
    """Three standard errors of a frequency over these trials are 3.8 points, and over 3 000 trials these settings cover
    0.941 (heavy tails) to 0.949: one point less is the price of so few samples."""
    fits = trials(lengths, samples, kind)
    assert {f.method for f in fits} == {method}
    assert 0.902 <= covered(fits, EXPONENT) <= 0.988
    assert covered(fits, EXPONENT + 0.15) < 0.5  # the count can fail
    assert np.mean([bool(f.breaks) for f in fits]) <= 0.04


def test_narrower_intervals_cover_less():
    assert 0.72 <= covered(trials(DOUBLING, 8, "independent", level=0.8), EXPONENT) <= 0.88


@pytest.mark.parametrize("factor", [2.0, 3.0, 0.5])
@pytest.mark.parametrize(("lengths", "samples"), [(DENSE, 8), (DENSE, 1), ((16, 32, 64, 128, 136, 256, 512), 1)])
def test_a_jump_between_neighbours_is_found_with_its_place_and_factor(lengths, samples, factor):
    random = np.random.default_rng(5)
    logs = EXPONENT * np.log(lengths) + 0.03 * random.standard_normal((samples, len(lengths)))
    found = fit(lengths, logs + np.log(factor) * (np.array(lengths) > 128))
    after = lengths[lengths.index(128) + 1]
    assert [(b.kind, b.before, b.after) for b in found.breaks] == [("jump", 128, after)]
    jump = found.breaks[0]
    assert jump.change.low is not None
    assert jump.change.high is not None
    assert jump.change.low <= factor <= jump.change.high
    assert jump.change.value == pytest.approx(factor, rel=0.15)
    assert jump.chance < 0.01
    assert found.exponent_apart.value == pytest.approx(EXPONENT, abs=0.05)
    assert abs(found.exponent.value - EXPONENT) > 0.1  # what one slope makes of it
    if factor > 1:
        assert (found.steepest.before, found.steepest.after) == (128, after)


def test_a_bend_is_not_taken_for_a_jump_nor_smooth_curvature_for_one():
    random = np.random.default_rng(6)
    x = np.log(DENSE)
    bent = 0.3 * np.minimum(x, np.log(128)) + 0.01 * random.standard_normal((8, len(x)))
    found = fit(DENSE, bent)
    assert [b.kind for b in found.breaks] == ["bend"]
    assert 96 <= found.breaks[0].before <= 160
    assert found.breaks[0].change.value == pytest.approx(-0.3, abs=0.05)
    curved = 0.08 * (x - x.mean()) ** 2 + 0.01 * random.standard_normal((8, len(x)))
    assert all(b.kind == "bend" for b in fit(DENSE, curved).breaks)


def test_two_jumps_are_both_found():
    random = np.random.default_rng(7)
    logs = 0.2 * np.log(DENSE) + np.log(2) * (np.array(DENSE) > 24) + np.log(3) * (np.array(DENSE) > 128)
    found = fit(DENSE, logs + 0.03 * random.standard_normal((8, len(DENSE))))
    assert [(b.kind, b.before, b.after) for b in found.breaks] == [("jump", 24, 32), ("jump", 128, 136)]


def test_an_exact_power_law_has_no_residuals_no_breaks_and_an_interval_of_no_width():
    for samples in (1, 8):
        found = fit(DOUBLING, np.tile(2 + 0.5 * np.log(DOUBLING), (samples, 1)))
        assert found.exponent.value == pytest.approx(0.5)
        assert found.exponent.low == pytest.approx(0.5)
        assert found.scale == pytest.approx(np.exp(2))
        assert np.allclose(found.residuals, 1)
        assert found.breaks == ()
        assert found.steepest.exponent == pytest.approx(0.5)


def test_scaling_the_values_moves_the_level_alone():
    random = np.random.default_rng(8)
    logs = 0.3 * np.log(DENSE) + 0.1 * random.standard_normal((8, len(DENSE)))
    one, two = fit(DENSE, logs), fit(DENSE, logs + np.log(1000))
    assert two.exponent.value == pytest.approx(one.exponent.value)
    assert two.exponent.low == pytest.approx(one.exponent.low)
    assert two.scale == pytest.approx(1000 * one.scale)


def test_rows_may_come_in_any_order_and_samples_may_miss_lengths():
    random = np.random.default_rng(9)
    rows = [(n, float(np.exp(0.3 * np.log(n) + 0.05 * random.standard_normal())), s) for n in DENSE for s in range(8)]
    shuffled = [rows[i] for i in random.permutation(len(rows))]
    one, two = (fit_growth(*map(list, zip(*r, strict=True))) for r in (rows, shuffled))  # pyright: ignore[reportArgumentType]
    assert one == two
    holes = [r for r in rows if not (r[0] == 512 and r[2] in (1, 5))]
    lengths, values, samples = zip(*holes, strict=True)
    found = fit_growth(lengths, values, samples)
    assert (found.samples, found.method) == (6, "samples")


def test_few_lengths_give_an_exponent_without_an_interval():
    found = fit_growth([8, 16, 32], [1.0, 2.0, 4.1])
    assert (found.method, found.exponent.low, found.breaks) == ("none", None, ())
    assert found.exponent.value == pytest.approx(1.0, abs=0.05)
    assert fit_growth([8, 16], [1.0, 2.0]).exponent.value == pytest.approx(1.0)


def test_lengths_rise_and_every_field_is_plain():
    found = fit(DENSE, 0.3 * np.log(DENSE)[None]).to_dict()
    assert all(a < b for a, b in pairwise(found["lengths"]))
    assert all(type(v) is float for v in found["means"])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([8, 16], [1.0]), "as many"),
        (([8, 8], [1.0, 2.0], [0, 1]), "two different lengths"),
        (([8, 16], [1.0, 0.0]), "positive"),
        (([8, 16], [1.0, float("nan")]), "positive"),
        (([8, 16, 16], [1.0, 2.0, 3.0]), "number the samples"),
    ],
)
def test_bad_rows_are_refused(arguments, match):
    with pytest.raises(BadInputError, match=match):
        fit_growth(*arguments)


def test_a_level_outside_zero_and_one_is_refused():
    with pytest.raises(BadInputError, match="level"):
        fit_growth([8, 16], [1.0, 2.0], level=95)
