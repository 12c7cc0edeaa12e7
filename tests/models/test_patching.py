"""`use_sdpa` and `patch`: models that call torch's attention differentiate through ours."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.models.interface import CHOICE
from howsmooth.program.modules import configurations
from problems.layers import gaussian

TORCHS = torch.nn.functional.scaled_dot_product_attention


class Block(nn.Module):
    """Attention as timm and diffusers write it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.drop = nn.Linear(8, 24, dtype=torch.float64), 0.0

    def forward(self, x):
        q, k, v = self.mix(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.drop if self.training else 0.0)
        return out.transpose(1, 2).flatten(2)


def hvp(f, x):
    return jvp(grad(lambda y: f(y).square().sum()), (x,), (x.flip(1),))[1]


@pytest.fixture
def calls(monkeypatch):
    """How often our operator runs."""
    from howsmooth.kernels import operators

    seen = []
    start = operators.Blocked.__init__

    def counted(self, *args, **kwargs):
        seen.append(1)
        start(self, *args, **kwargs)

    monkeypatch.setattr(operators.Blocked, "__init__", counted)
    return seen


@pytest.mark.parametrize("make", [Block, lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True, dtype=torch.float64)])
def test_a_module_in_torch(make, calls):
    torch.manual_seed(0)
    model, x = make().eval(), gaussian(2, 5, 8, seed=0)
    with sdpa_kernel(SDPBackend.MATH):
        want = model(x.requires_grad_()).detach(), hvp(model, x.detach())
    x = x.detach()
    with hs.use_sdpa(), hs.use_sdpa():
        got = model(x), hvp(model, x)
    assert calls
    assert TORCHS is nn.functional.scaled_dot_product_attention
    patched = hs.patch(hs.patch(model))
    assert patched is model
    calls.clear()
    for a, b, c in zip(got, want, (model(x), hvp(copy.deepcopy(model), x)), strict=True):
        assert float((a - b).detach().abs().max()) < 1e-12
        assert torch.equal(a, c)
    assert calls
    assert TORCHS is nn.functional.scaled_dot_product_attention


def test_a_patched_model_is_measured_as_before():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    x = gaussian(1, 5, 8, seed=0).float()
    before, after = (hs.load(m).measure(inputs=x, layer=0) for m in (layer, hs.patch(copy.deepcopy(layer))))
    assert after.cut
    assert after.value == pytest.approx(before.value, rel=1e-6)


def test_torchs_function_comes_back_after_an_error():
    model = hs.patch(Block()).train()
    model.drop = 1.0  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadInputError, match="expected a dropout_p of at least 0 and below 1"):
        model(gaussian(1, 3, 8, seed=0))
    assert TORCHS is nn.functional.scaled_dot_product_attention
    assert torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(BadInputError, match=r"expected a torch\.nn\.Module"):
        hs.patch("gpt2")  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_a_model_of_the_library():
    """Second derivatives of a whole model with grouped heads and rotary positions, against its eager code."""
    hf: Any = __import__("transformers")
    config = hf.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.LlamaModel(config).double().eval().requires_grad_(False)

    def f(x):
        return model(inputs_embeds=x, use_cache=False).last_hidden_state

    x = gaussian(1, 7, 16, seed=0)
    want = hvp(f, x)
    hs.patch(model)
    assert {c._attn_implementation for c in configurations(model, CHOICE)} == {"howsmooth"}
    assert float((hvp(f, x) - want).norm() / want.norm()) < 1e-5  # the library takes norms and rotary phases in float32


@pytest.mark.slow
def test_importing_the_package_beside_the_library_is_enough():
    code = "import transformers, howsmooth; assert 'howsmooth' in transformers.AttentionInterface().valid_keys()"
    where = {"PYTHONPATH": str(Path(hs.__file__).parents[1])}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=os.environ | where)
