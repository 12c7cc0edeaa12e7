"""Architectures of the transformers library: attention and blocks against dense Jacobians that the package has no part in."""

import inspect

import pytest
import torch
from torch import nn

from howsmooth.program import Layers, record
from problems.zoo import ZOO, Animal, randomize, reference

from .test_corpus import norm_of


def built(animal: Animal) -> nn.Module:
    model = randomize(animal.build(), scale=animal.scale).double()
    if animal.side is not None:
        model = getattr(model, f"get_{animal.side}")()
    assert isinstance(model, nn.Module)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["bert", "deberta-v2", "t5 encoder", "gpt2", "llama", "gemma2 global", "vit", "swin v2 shifted"]
)
def test_equal_to_the_models_own(kind):
    animal = ZOO[kind]
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in animal.inputs().items()}
    model = built(animal)
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    layers = Layers(record(model, (), inputs))
    paths = {name: getattr(animal, name).format(animal.layer) for name in ("attention", "projection", "block")}
    for map, start, end in (("attention", paths["attention"], paths["projection"]), ("block", paths["block"], paths["block"])):
        _, dense = reference(built(animal), inputs, start, end)
        truth = float(torch.linalg.matrix_norm(dense, 2))
        assert norm_of(layers, layer=animal.layer, map=map) == pytest.approx(truth, rel=1e-6), map
