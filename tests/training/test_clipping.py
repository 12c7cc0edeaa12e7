"""Weights scaled head by head until what is measured is at most a target."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model, GPTNeoXConfig, GPTNeoXModel, LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

import howsmooth as hs

TOKENS: dict[str, Any] = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0}
WIDE: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 24}
IDS = torch.randint(0, 20, (2, 7), generator=torch.Generator().manual_seed(0))


def layer(kv_heads: int = 2, **more: Any) -> hs.Attention:
    random = torch.Generator().manual_seed(1)
    shapes = [(8, 8), (2 * kv_heads, 8), (2 * kv_heads, 8), (8, 8)]
    w = [torch.randn(s, generator=random) for s in shapes]
    biases = {"b_q": torch.randn(8, generator=random), "b_k": torch.randn(2 * kv_heads, generator=random)}
    return hs.Attention(*w, heads=4, kv_heads=kv_heads, causal=True, **biases, **more)


def logits(attn: hs.Attention, x: torch.Tensor) -> list[float]:
    q, k, _ = attn.vectors(x[None])
    k = k.repeat_interleave(attn.heads // attn.kv_heads, 1)
    seen = (attn.scale * q @ k.mT)[0].masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    return seen.amax((1, 2)).tolist()


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_logits_of_heads_that_are_over_and_no_others(kv_heads):
    attn = layer(kv_heads)
    before = logits(attn, X)
    target = sorted(before)[1] * 1.01
    clipped = hs.clip_(attn, X, target, quantity="logit")
    after = logits(attn, X)
    for h in range(4):
        assert after[h] == pytest.approx(min(before[h], target), rel=1e-4)
        assert after[h] <= target
    assert [row.head for row in clipped.changed] == [h for h in range(4) if before[h] > target]
    assert clipped.to_dict()["rows"][0]["before"] == pytest.approx(before[0], rel=1e-5)


@pytest.mark.parametrize("parts", ["vo", "qkvo"])
def test_constants_of_heads(parts):
    attn = layer()
    before = [hs.lipschitz(attn.head(h), X).value for h in range(4)]
    target = 0.6 * min(before)
    hs.clip_(attn, X, target, parts=parts)
    after = [hs.lipschitz(attn.head(h), X).value for h in range(4)]
    assert all(0.98 * target <= a <= target * (1 + 1e-3) for a in after)


def test_query_and_key_weights_alone_reach_what_uniform_attention_allows():
    attn, flat = layer(), layer()
    flat.w_q.zero_()
    flat.b_q.zero_()  # pyright: ignore[reportOptionalMemberAccess]
    floor = max(hs.lipschitz(flat.head(h), X).value for h in range(4))
    values = attn.w_v.clone()
    hs.clip_(attn, X, 1.05 * floor)
    assert max(hs.lipschitz(attn.head(h), X).value for h in range(4)) <= 1.05 * floor * (1 + 1e-3)
    assert torch.equal(attn.w_v, values)
    again = attn.w_q.clone()
    with pytest.raises(hs.HowSmoothError, match="expected a target that scaling qk can reach"):
        hs.clip_(attn, X, 0.5 * floor)
    assert torch.equal(attn.w_q, again)


def test_a_softcap_is_allowed_for():
    attn = layer(softcap=5.0)
    hs.clip_(attn, X, 2.0, quantity="logit")
    assert all(5 * torch.tanh(torch.tensor(s / 5)) <= 2.0 for s in logits(attn, X))


def grown(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.ndim > 1 else 1)
    return model.train()


BUILD = {
    "fused, columns": lambda: GPT2Model(GPT2Config(n_layer=2, n_embd=16, n_head=4, n_positions=8, **TOKENS)),
    "shared keys, rotary": lambda: LlamaModel(LlamaConfig(**WIDE, num_key_value_heads=2, max_position_embeddings=8, **TOKENS)),
    "fused by head": lambda: GPTNeoXModel(GPTNeoXConfig(**WIDE, max_position_embeddings=8, **TOKENS)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILD)
def test_a_model_through_its_own_parameters(name):
    torch.manual_seed(0)
    model, probe = grown(BUILD[name]()), {"input_ids": IDS}
    tracker = hs.Tracker(model, probe, layers=[1], heads="logits", check_every=0)
    before = tracker.update()
    heads = [k for k in before if "max_logit/layer_01/" in k]
    target = 0.5 * max(before[k] for k in heads)
    clipped = hs.clip_(model, probe, target, quantity="logit", layers=[1])
    after = tracker.update()
    for row, key in zip(clipped.rows, heads, strict=True):
        assert after[key] <= target * (1 + 1e-5)
        assert after[key] == pytest.approx(min(before[key], target), rel=1e-3)
        assert row.before == pytest.approx(before[key], rel=1e-4)
    assert model.training


@pytest.mark.slow
def test_a_model_that_cannot_be_brought_there_is_put_back():
    torch.manual_seed(0)
    model = grown(BUILD["fused, columns"]())
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(hs.HowSmoothError, match="expected a target that scaling qk can reach"):
        hs.clip_(model, {"input_ids": IDS}, 1e-6)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_torch_s_own_module():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    clipped = hs.clip_(grown(model), X[None], 0.5, quantity="logit")
    assert all(row.after <= 0.5 for row in clipped.rows)
    assert clipped.changed


@pytest.mark.parametrize("number", [1.0, 2, torch.tensor(1.0)])
def test_a_number_in_second_place_is_refused(number):
    with pytest.raises(hs.HowSmoothError, match=r"got a number; call clip_\(layer, x, target\)"):
        hs.clip_(layer(), number, X)  # pyright: ignore[reportArgumentType]


def test_bad_input():
    with pytest.raises(hs.HowSmoothError, match="expected a target above 0"):
        hs.clip_(layer(), X, 0.0)
    with pytest.raises(hs.HowSmoothError, match="width 8"):
        hs.clip_(layer(), torch.ones(3, 5), 1.0)
    w = torch.eye(8)
    with pytest.raises(hs.HowSmoothError, match="got one tensor twice"):
        hs.clip_(hs.Attention(w, w, torch.eye(8)), X, 1.0)
    torch.manual_seed(0)
    normed = Qwen3Model(Qwen3Config(**WIDE, num_key_value_heads=2, head_dim=4, max_position_embeddings=8, **TOKENS))
    with pytest.raises(hs.HowSmoothError, match="without norms"):
        hs.clip_(grown(normed), {"input_ids": IDS}, 1e-3, quantity="logit")
