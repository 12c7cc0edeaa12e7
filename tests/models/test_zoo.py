"""Every architecture against the dense Jacobian of its own eager float64 model."""

import warnings
from functools import cache

import pytest
import torch
from checks import PARITY
from problems.zoo import ZOO, randomize, reference

import howsmooth as hs
from howsmooth.models import FallbackWarning, Model


@cache
def model_of(name: str) -> Model:
    return hs.load(randomize(ZOO[name].build()).double(), side=ZOO[name].side)


def eager(model: Model) -> torch.nn.Module:
    model.module.set_attn_implementation("eager")
    return model.module


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("kind", ["attention", "block"])
def test_equals_the_dense_jacobian(name: str, kind: str):
    animal, model = ZOO[name], model_of(name)
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in animal.inputs().items()}
    layer = animal.layer
    start = (animal.attention if kind == "attention" else animal.block).format(layer)
    end = (animal.projection if kind == "attention" else animal.block).format(layer)
    x, jacobian = reference(eager(model), inputs, start, end)
    truth = float(torch.linalg.matrix_norm(jacobian, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error" if animal.cut else "ignore", FallbackWarning)
        captured = model.capture(inputs=inputs)
        got = captured.measure(layer, kind)
        start_tokens = captured.tokens(layer, kind)
    assert got.cut == animal.cut
    assert captured.num_layers >= 2
    assert got.n == len(x)
    assert start_tokens.sub(x).abs().max() <= PARITY * x.abs().max()
    assert got.value == pytest.approx(truth, rel=PARITY)
