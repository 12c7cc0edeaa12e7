"""Every architecture against the dense Jacobian of its own eager float64 model."""

import warnings
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from checks import PARITY
from howsmooth.models import FallbackWarning, Model
from howsmooth.models.capture import Capture
from howsmooth.models.measurement import Measurement
from howsmooth.program.ends import MapName
from marks import first
from problems.zoo import LENGTH, ZOO, Animal, ids, randomize, reference

# what these models give is NaN where a query sees no key: they add float64's lowest number to logits and cast them to float32
NOT_FINITE = ("bloom", "gemma2 local", "gemma2 global")


@cache
def model_of(name: str) -> Model:
    return hs.load(randomize(ZOO[name].build(), scale=ZOO[name].scale).double(), side=ZOO[name].side)


def truth_of(name: str, kind: str, inputs: dict[str, Any], real: Tensor | None = None) -> tuple[Tensor, float]:
    """The tokens and the norm, from the model's eager code alone."""
    animal: Animal = ZOO[name]
    module: Any = model_of(name).module
    start = (animal.attention if kind == "attention" else animal.block).replace("{}", str(animal.layer))
    end = (animal.projection if kind == "attention" else animal.block).replace("{}", str(animal.layer))
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    x, jacobian = reference(module, inputs, start, end, real)
    module.set_attn_implementation(before)
    return x, float(torch.linalg.matrix_norm(jacobian, 2))


def measured(name: str, captured: Capture, kind: MapName) -> Measurement:
    """The measurement, with a warning where the architecture falls back and none where it does not."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = captured.measure(ZOO[name].layer, kind)
    assert any(issubclass(w.category, FallbackWarning) for w in caught) != ZOO[name].cut
    return got


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("kind", ["attention", "block"])
def test_equals_the_dense_jacobian(name: str, kind: MapName):
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in ZOO[name].inputs().items()}
    x, truth = truth_of(name, kind, inputs)
    captured = model_of(name).capture(inputs=inputs)
    got = measured(name, captured, kind)
    assert got.cut == ZOO[name].cut
    assert captured.num_layers >= 2
    assert got.n == len(x)
    assert got.radius_rms == pytest.approx(float(x.norm() / len(x) ** 0.5), rel=PARITY)
    assert got.value == pytest.approx(truth, rel=PARITY)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if ZOO[name].pads])
@pytest.mark.parametrize("left", first([False, True]), ids=["right", "left"])
def test_padding_is_no_part_of_the_input(name: str, left: bool):
    """One row of a padded batch has the constant that the whole batch's Jacobian gives it."""
    longer, pad = ids(seed=1, n=LENGTH + 3), 3
    padding = torch.zeros(1, pad, dtype=torch.long)
    row = torch.cat([padding, ids()] if left else [ids(), padding], 1)
    mask = torch.ones(2, LENGTH + pad, dtype=torch.long)
    mask[0, :pad] = int(not left)
    mask[0, LENGTH:] = int(left)
    batch = {"input_ids": torch.cat([row, longer]), "attention_mask": mask}
    real = torch.nonzero(mask[0])[:, 0]
    _, truth = truth_of(name, "attention", batch, real)
    if left and name in NOT_FINITE:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            got = None
            with suppress(hs.HowSmoothError):
                got = model_of(name).measure(ids=row, mask=mask[0], layer=ZOO[name].layer)
        if got is None:
            return
    else:
        got = measured(name, model_of(name).capture(ids=row, mask=mask[0]), "attention")
    assert got.n == LENGTH == len(got.input_share) == len(got.output_share)
    assert got.value == pytest.approx(truth, rel=PARITY)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama", "t5 encoder", "gemma3 local"])
def test_padding_on_the_right_changes_nothing(name: str):
    row = torch.cat([ids(), torch.zeros(1, 4, dtype=torch.long)], 1)
    alone = model_of(name).measure(ids=ids(), layer=ZOO[name].layer)
    padded = model_of(name).measure(ids=row, mask=[True] * LENGTH + [False] * 4, layer=ZOO[name].layer)
    assert padded.value == pytest.approx(alone.value, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma2 local", "vit", "t5 encoder"])
def test_other_maps_equal_the_dense_jacobian(name: str):
    """`heads` ends where the projection begins, `normed` begins where the block does, `model` spans all blocks."""
    animal, model = ZOO[name], model_of(name)
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in animal.inputs().items()}
    captured = model.capture(inputs=inputs)
    module: Any = model.module
    layer = animal.layer
    block, first = animal.block.format(layer), animal.block.format(0)
    last = {"bert": "encoder.layer.1", "gpt2": "ln_f", "vit": "layernorm", "t5 encoder": "final_layer_norm"}.get(name, "norm")
    projection = animal.projection.format(layer)
    watch = nn.Identity()
    paths: dict[MapName, tuple[str, str]] = {
        "heads": (animal.attention.format(layer), projection),
        "model": (first, last),
        "normed": (block, projection),
    }
    for kind, (start, end) in paths.items():
        if kind == "normed" and name == "bert":
            continue
        before = module.config._attn_implementation
        module.set_attn_implementation("eager")
        if kind == "heads":  # a module that hands on what enters the projection
            parent, _, leaf = projection.rpartition(".")
            owner, original = module.get_submodule(parent), module.get_submodule(projection)
            setattr(owner, leaf, nn.Sequential(watch, original))
            _, jacobian = reference(module, inputs, start, f"{projection}.0")
            setattr(owner, leaf, original)
        else:
            _, jacobian = reference(module, inputs, start, end)
        module.set_attn_implementation(before)
        truth = float(torch.linalg.matrix_norm(jacobian, 2))
        casts = 10 if kind == "model" else 1  # the library's float32 casts add up over the norms of all blocks
        assert captured.measure(layer, kind).value == pytest.approx(truth, rel=casts * PARITY), kind


@pytest.mark.slow
@pytest.mark.parametrize(("name", "heads"), [("bert", 2), ("llama", 4), ("gpt2", 2), ("t5 encoder", 2)])
def test_one_head_is_the_layer_with_the_others_cut_off(name: str, heads: int):
    animal, model = ZOO[name], model_of(name)
    weight: Any = model.module.get_submodule(animal.projection.format(animal.layer)).weight
    captured = model.capture(ids=ids())
    got = captured.measure(animal.layer, heads=True)
    assert len(got.heads) == heads
    kept = weight.detach().clone()
    rows = name == "gpt2"  # its projection has the shape (in, out)
    width = kept.shape[0 if rows else 1] // heads
    for h in range(heads):
        alone = torch.zeros_like(kept)
        part = (slice(h * width, (h + 1) * width), slice(None)) if rows else (slice(None), slice(h * width, (h + 1) * width))
        alone[part] = kept[part]
        weight.data.copy_(alone)
        _, truth = truth_of(name, "attention", {"input_ids": ids()})
        weight.data.copy_(kept)
        assert got.heads[h].value == pytest.approx(truth, rel=PARITY)
        assert captured.measure(animal.layer, head=h).value == pytest.approx(truth, rel=PARITY)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "llama"])
def test_experts_are_frozen_and_the_note_says_so(name: str):
    captured = model_of(name).capture(ids=ids())
    routed = [any("routing is frozen" in note for note in captured.measure(1, kind).notes) for kind in ("attention", "block")]
    assert routed == [False, name != "llama"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("kind", ["attention", "block"])
def test_a_gpu_finds_the_same(name: str, kind: MapName):
    """In single precision on the fused kernels, against the dense Jacobian in double precision."""
    animal, inputs = ZOO[name], {k: v.double() if v.is_floating_point() else v for k, v in ZOO[name].inputs().items()}
    _, truth = truth_of(name, kind, inputs)
    model = hs.load(randomize(animal.build(), scale=animal.scale), "cuda", side=animal.side)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # falls back where it does elsewhere
        got = model.capture(inputs=inputs).measure(animal.layer, kind)
    assert got.direction.is_cuda
    assert got.cut == animal.cut
    assert abs(got.value - truth) <= 1e-3 * truth
    assert got.upper >= truth * (1 - 1e-4)  # its tokens come from a forward pass in single precision
