"""`attn_implementation="howsmooth"`: both derivatives of whole models, against the library's eager attention in float64."""

import copy
import importlib
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from howsmooth.errors import BadInputError
from howsmooth.models import interface
from howsmooth.models.interface import register
from problems.layers import gaussian

N, WIDTH = 11, 16
PADDED = torch.tensor([[1] * N, [1] * (N - 3) + [0] * 3])
SHARED = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


@cache
def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """One random model twice: eager, and on the kernels."""
    hf: Any = importlib.import_module("transformers")
    register()
    llama = SHARED | TOKENS | {"num_key_value_heads": 2}
    gpt2 = TOKENS | {"n_layer": 2, "n_embd": WIDTH, "n_head": 2, "vocab_size": 50, "n_positions": 64}
    gemma = llama | {"head_dim": 4, "sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}
    kinds: dict[str, tuple[Any, Any]] = {
        "gpt2": (hf.GPT2Model, hf.GPT2Config(**gpt2)),
        "llama": (hf.LlamaModel, hf.LlamaConfig(**llama)),
        "mistral": (hf.MistralModel, hf.MistralConfig(**llama, sliding_window=4)),
        "gemma2": (hf.Gemma2Model, hf.Gemma2Config(**gemma)),
        "bert": (hf.BertModel, hf.BertConfig(**SHARED)),
    }
    kind, config = kinds[name]
    models = []
    for implementation in ("eager", "howsmooth"):
        own = copy.deepcopy(config)
        own._attn_implementation = implementation
        models.append(kind(own).double().eval())
    with torch.no_grad():
        for i, (a, b) in enumerate(zip(models[0].parameters(), models[1].parameters(), strict=True)):
            a.copy_(0.5 * gaussian(*a.shape, seed=i))
            b.copy_(a)
    return models[0], models[1]


def function(model: nn.Module, mask: Tensor | None):
    def f(x: Tensor) -> Tensor:
        y = model(inputs_embeds=x, attention_mask=mask, use_cache=False).last_hidden_state
        return y if mask is None else y * mask[..., None]

    return f


@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2", "bert"])
def test_both_derivatives(name, mask):
    f, g = (function(m, mask) for m in pair(name))
    x, v, u = (gaussian(2, N, WIDTH, seed=i) for i in range(3))
    want, got = torch.func.jvp(f, (x,), (v,)), torch.func.jvp(g, (x,), (v,))
    pulled, pull = torch.func.vjp(f, x), torch.func.vjp(g, x)
    leaf = x.clone().requires_grad_()
    pairs = [
        (got[0], want[0]),
        (got[1], want[1]),
        (pull[1](u)[0], pulled[1](u)[0]),
        (torch.autograd.grad(g(leaf), leaf, u)[0], pulled[1](u)[0]),
    ]
    for a, b in pairs:  # the library takes its norms and softmax in float32
        assert float(((a - b).norm() / b.norm()).detach()) < 1e-6


def test_what_it_cannot_do_is_refused():
    model = pair("gpt2")[1]
    ids = torch.arange(5)[None]
    kept = model(ids, use_cache=True).past_key_values
    with pytest.raises(BadInputError, match="expected attention over whole sequences"):
        model(ids[:, :1], past_key_values=kept)
    model.train()
    try:
        with pytest.raises(BadInputError, match="dropout"):
            model(ids)
    finally:
        model.eval()


def test_masks_are_forgotten_in_the_end():
    model = pair("mistral")[1]
    for _ in range(50):
        model(torch.arange(5)[None], use_cache=False)
    assert len(interface._HANDED_OUT) <= 64
