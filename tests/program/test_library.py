"""Architectures of the transformers library: attention and blocks against dense Jacobians that the package has no part in."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from howsmooth.errors import HowSmoothError
from howsmooth.program import Layers, record
from marks import first
from problems.library import PARTS, architectures, attention_in, build, dense, parts, pictured

from .test_corpus import norm_of

FORTY = [
    "albert",
    "bert",
    "bloom",
    "canine",
    "clip",
    "convbert",
    "ctrl",
    "deberta",
    "deberta-v2",
    "deepseek_v32",
    "distilbert",
    "falcon",
    "fnet",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "hiera",
    "ibert",
    "layoutlm",
    "llama",
    "mamba",
    "mamba2",
    "mixtral",
    "mobilebert",
    "modernbert",
    "mpnet",
    "mpt",
    "olmo2",
    "opt",
    "phi",
    "qwen2_moe",
    "qwen3",
    "roformer",
    "rwkv",
    "squeezebert",
    "swin",
    "t5",
    "xglm",
]
KEY = "_experts_implementation_internal"
# whose values autograd is not told of: a backward pass of its own, a choice passed straight through, steps without gradients
OTHER_DERIVATIVES = {"yoso", "groupvit", "hrm_text"}
NO_SOFTMAX = {"fnet", "mamba", "mamba2", "rwkv"}


def runs(part: nn.Module, inputs: dict[str, Any]) -> bool:
    """Whether a module knows float64."""
    try:
        with torch.no_grad(), plain(part):
            part(**inputs)
    except RuntimeError:
        return False
    return True


@contextmanager
def plain(module: nn.Module) -> Iterator[None]:
    """Inside it transformers' experts run one by one, which knows float64."""
    configs: list[Any] = [m.config for m in module.modules() if KEY in getattr(getattr(m, "config", None), "__dict__", ())]
    before = [(config, getattr(config, KEY)) for config in {id(c): c for c in configs}.values()]
    try:
        for config, _ in before:
            setattr(config, KEY, "eager")
        yield
    finally:
        for config, old in before:
            setattr(config, KEY, old)


def as_float32(part: nn.Module, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    narrow = {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    return copy.deepcopy(part).float(), narrow


def truth(part: nn.Module, inputs: dict[str, Any], layers: Layers, layer: int, map: str) -> float | None:
    """The norm of the dense Jacobian of a model's own block, or of its attention; nothing where none is known."""
    path = layers.found[layer].path
    block = part.get_submodule(path)
    whole = None if type(block).__name__ in PARTS else (block, block)
    ends = whole if map == "block" else attention_in(part, block)
    if ends is None:
        return None
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with plain(part):
            made = dense(part, inputs, *ends, call=sum(other.path == path for other in layers.found[:layer]))
    finally:
        torch.set_default_dtype(before)
    return float(torch.linalg.matrix_norm(made, 2))


def wrong(part: nn.Module, inputs: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the first and the last layer of a model."""
    wide = runs(part, inputs)
    layers = Layers(record(part, (), inputs) if wide else record((narrow := as_float32(part, inputs))[0], (), narrow[1]))
    if not layers.found:
        yield "no layers"
    for layer in sorted({0, len(layers.found) - 1} if layers.found else ()):
        for map in ("block", "attention") if layers.found[layer].groups else ("block",):
            value, expected = norm_of(layers, layer=layer, map=map), truth(part, inputs, layers, layer, map)
            if expected is not None and not abs(value - expected) <= 1e-6 * expected:
                yield f"{map} of {layers.found[layer].path}: {value}, the truth is {expected}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", first(FORTY[::2] + FORTY[1::2], 20))
def test_equal_to_the_models_own(kind):
    for _, part, inputs in parts(build(kind)):
        assert not list(wrong(part, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(NO_SOFTMAX))
def test_without_softmax_layers_are_blocks(kind):
    _, part, inputs = next(parts(build(kind)))
    assert runs(part, inputs)  # RWKV scales its weights in place at its first run, which is no function
    layers = Layers(record(part, (), inputs))
    assert [len(layer.groups) for layer in layers.found] == [0, 0]
    with pytest.raises(HowSmoothError, match="measure map='block'"):
        norm_of(layers, layer=0, map="attention")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llava", "qwen3_vl", "internvl"])
def test_pictures_among_words(kind):
    model, inputs = pictured(kind)
    layers = Layers(record(model, (), inputs))
    assert layers.found[0].path.startswith(("vision", "visual"))
    assert layers.found[-1].path.startswith("language")
    assert not list(wrong(model, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_in_other_precisions(kind, dtype):
    """Grouped products are replayed in float64, at the weights that the precision has."""
    model: Any = build(kind)
    _, part, inputs = next(parts(model))
    narrow = part.to(dtype)
    layers = Layers(record(narrow, (), inputs))
    again: Any = copy.deepcopy(narrow).double()
    value, expected = norm_of(layers, layer=0, map="block"), truth(again, inputs, layers, 0, "block")
    assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("kind", [kind for kind in architectures() if kind not in FORTY])
def test_all_others(kind):
    """Architectures that the recipe builds and runs are right or refused in a sentence; the others are skipped."""
    if kind in OTHER_DERIVATIVES:
        pytest.skip("its derivative by autograd is not that of its values, which is measured")
    try:
        model: PreTrainedModel = build(kind)
        sides = list(parts(model))
        for _, part, inputs in sides:
            narrow, less = as_float32(part, inputs)
            with torch.no_grad():
                narrow(**less)
    except Exception as error:
        pytest.skip(f"the recipe does not build or run it: {type(error).__name__}")
    for _, part, inputs in sides:
        try:
            assert not [text for text in wrong(part, inputs) if text != "no layers"]
        except HowSmoothError as refusal:
            assert str(refusal).startswith("expected ")  # noqa: PT017, what is refused is not wrong


def test_checker_refuses():
    _, part, inputs = next(parts(build("bert")))
    assert not list(wrong(part, inputs))
    layers = Layers(record(part, (), inputs))
    with torch.no_grad():
        part.get_submodule("encoder.layer.1.output.dense").weight.mul_(2)  # pyright: ignore
    expected = truth(copy.deepcopy(part), inputs, layers, 1, "block")
    with torch.no_grad():
        part.get_submodule("encoder.layer.1.output.dense").weight.div_(2)  # pyright: ignore
    assert norm_of(layers, layer=1, map="block") != pytest.approx(expected, rel=1e-6)
