"""Attention as a push-forward of measures."""

from dataclasses import replace

import pytest
import torch

import howsmooth as hs
from checks import assert_close
from howsmooth.errors import BadInputError
from problems.layers import gaussian
from problems.measures import KINDS, Bare, layer, make, random_measure


@pytest.mark.parametrize("kind", KINDS)
def test_equal_masses_are_tokens(kind):
    f, x = make(kind, 0), gaussian(6, 3, seed=1)
    image = f(hs.Measure.from_tokens(x, causal=True))
    assert_close(image.points, f(x), growth=10)
    assert image.positions is not None
    assert image.positions.tolist() == pytest.approx([(i + 1) / 6 for i in range(6)])


@pytest.mark.parametrize("causal", [False, True])
def test_definition(causal):
    """`Γ(s, x) = ∫_{τ≤s} V y e^{⟨Ax,y⟩} dμ / ∫_{τ≤s} e^{⟨Ax,y⟩} dμ`, atom by atom."""
    A, V = gaussian(3, 3, seed=0), gaussian(2, 3, seed=1)
    mu = random_measure(9, 2)
    assert mu.positions is not None
    assert len(set(mu.positions.tolist())) < 9  # some tie
    image = hs.Attention.from_matrices(A, V, causal=causal)(mu).points
    for i in range(9):
        total, mass = torch.zeros(2).double(), 0.0
        for j in range(9):
            if causal and mu.positions[j] > mu.positions[i]:
                continue
            w = float(mu.mass[j]) * float(torch.exp((A @ mu.points[i]) @ mu.points[j]))
            total, mass = total + w * (V @ mu.points[j]), mass + w
        assert_close(image[i], total / mass, growth=30)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [2, 3])
def test_splitting_an_atom_leaves_the_image_alone(kind, parts):
    f, mu = make(kind, 0), random_measure(5, 1)
    image = f(mu)
    for atom in (None, 0, 4):
        again = f(mu.split(atom, parts))
        assert hs.wasserstein(again, image).upper == pytest.approx(0, abs=1e-7)
        merged = again.merge(1e-9)
        assert len(merged) == 5
        assert_close(merged.points, image.points, growth=1e3)


@pytest.mark.parametrize("kind", ["plain", "grouped", "two layers"])
def test_atoms_have_no_order_without_a_mask(kind):
    f, mu = make(kind, 0), random_measure(6, 1)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    free = hs.Measure(mu.points, mu.mass)
    assert_close(f(hs.Measure(mu.points[order], mu.mass[order])).points, f(free).points[order], growth=10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_reference_agrees_with_the_kernels(kind):
    f, mu = make(kind, 0), random_measure(7, 1)
    points = mu.points.clone().requires_grad_()
    graph = f(mu.moved(points))
    assert graph.points.requires_grad
    assert_close(graph.points.detach(), f(mu).points, growth=10)


def test_a_window_a_bias_and_padding_are_refused():
    mu = random_measure(4, 0)
    for options in ({"window": 2}, {"bias": torch.zeros(1, 1, 4, 4)}, {"attention_mask": torch.ones(1, 4).bool()}):
        with pytest.raises(BadInputError, match=r"^expected a layer without \w+ for a measure, got one with it; \w+"):
            replace(layer(0), **options)(mu)


def test_masked_attention_needs_positions():
    with pytest.raises(BadInputError, match=r"^expected a measure with positions for masked attention, got one without; "):
        make("causal", 0)(hs.Measure(gaussian(4, 3, seed=0)))


def test_another_width_is_refused():
    with pytest.raises(BadInputError, match=r"^expected tokens of width 3, got 2"):
        layer(0)(hs.Measure(gaussian(4, 2, seed=0)))


def test_a_map_without_measures_says_so():
    with pytest.raises(BadInputError, match=r"^expected a map that acts on measures, got Bare"):
        Bare()(random_measure(4, 0))
