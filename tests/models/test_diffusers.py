"""Models of diffusers: their registry of attention backends knows `howsmooth`."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.models.patching import register_backend
from problems.layers import gaussian

diffusers: Any = pytest.importorskip("diffusers", reason="needs diffusers: pip install diffusers")
dispatch: Any = importlib.import_module("diffusers.models.attention_dispatch")


@pytest.fixture(autouse=True)
def native():
    """Setting a model's backend sets it for all that have chosen none."""
    register_backend()
    before = dispatch._AttentionBackendRegistry._active_backend
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(before)


def flux() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Two streams, as in FLUX.1: 16 image tokens beside 5 of the text."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=8, pooled_projection_dim=6, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    rest = {
        "encoder_hidden_states": gaussian(1, 5, 8, seed=1),
        "pooled_projections": gaussian(1, 6, seed=2),
        "timestep": torch.full((1,), 0.5, dtype=torch.float64),
        "img_ids": torch.zeros(16, 3, dtype=torch.float64),
        "txt_ids": torch.zeros(5, 3, dtype=torch.float64),
    }
    return model.double().eval(), {"hidden_states": gaussian(1, 16, 4, seed=0), **rest}


def dit() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """DiT: 16 tokens of an 8 × 8 latent."""
    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=10,
    )
    rest = {"timestep": torch.tensor([3]), "class_labels": torch.tensor([1])}
    return model.double().eval(), {"hidden_states": gaussian(1, 4, 8, 8, seed=0), **rest}


def field(model: torch.nn.Module, inputs: dict[str, torch.Tensor]):
    rest = {name: t for name, t in inputs.items() if name != "hidden_states"}
    return lambda x: functional_call(model, {}, (x,), rest | {"return_dict": False})[0]


def products(f, x):
    """The output, its jvp and a Hessian-vector product, which only torch's math attention has in torch."""
    return [*jvp(f, (x,), (x.cos(),)), jvp(grad(lambda y: f(y).square().sum()), (x,), (x.cos(),))[1]]


@pytest.mark.slow
@pytest.mark.parametrize("make", [flux, dit])
def test_a_patched_model_has_every_derivative(make):
    model, inputs = make()
    f, x = field(model, inputs), inputs["hidden_states"]
    with sdpa_kernel(SDPBackend.MATH):
        want = products(f, x)
    with pytest.raises(NotImplementedError):
        products(f, x)
    torch.testing.assert_close(products(field(hs.patch(model), inputs), x), want, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_the_own_way_of_the_registry():
    model, inputs = flux()
    f, x = field(model, inputs), inputs["hidden_states"]
    with sdpa_kernel(SDPBackend.MATH):
        want = products(f, x)
    with pytest.raises(NotImplementedError):
        products(f, x)
    model.set_attention_backend("howsmooth")  # pyright: ignore[reportCallIssue]
    torch.testing.assert_close(products(f, x), want, rtol=1e-6, atol=1e-6)


def test_masks_and_grouped_heads_as_in_the_native_backend():
    q, k = gaussian(2, 5, 4, 3, seed=0), gaussian(2, 6, 2, 3, seed=1)
    masks = torch.arange(6) < torch.tensor([[4], [6]]), gaussian(5, 6, seed=2)
    for mask in masks:
        by = {
            name: dispatch.dispatch_attention_fn(q, k, k, mask, enable_gqa=True, backend=name)
            for name in ("native", "howsmooth")
        }
        torch.testing.assert_close(by["howsmooth"], by["native"], rtol=1e-12, atol=1e-12)


def test_its_context_parallelism_is_refused():
    q = gaussian(1, 2, 1, 2, seed=0)
    with pytest.raises(BadInputError, match=r"^expected whole sequences .*, got diffusers' context parallelism; "):
        dispatch.dispatch_attention_fn(q, q, q, backend="howsmooth", parallel_config=object())


@pytest.mark.slow
def test_the_how_to_runs():
    page = (Path(__file__).parents[2] / "docs/howto/diffusers.md").read_text("utf-8")
    blocks = re.findall(r"^```text\n(.*?)^```$", page, re.M | re.S)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    shapes = []
    for block in blocks:
        exec(block, names)
        shapes += [tuple(names.pop("tangent").shape)] if "tangent" in names else []
    assert shapes == [(1, 256, 64), (1, 4, 32, 32)]
