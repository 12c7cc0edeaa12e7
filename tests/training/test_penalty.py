"""The constant as something to differentiate: exact at the top pair, against finite differences in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import howsmooth as hs


def weights(d: int = 8, seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [1.5 * torch.randn(d, d, generator=random, dtype=torch.float64) / d**0.5 for _ in range(4)]


def attention(w: list[Tensor]) -> hs.Attention:
    return hs.Attention(*w, heads=2, causal=True, rotary=None)


def slopes(f: Any, at: list[Tensor], eps: float = 1e-5) -> list[tuple[Tensor, float]]:
    """For every tensor, a direction and the derivative of `f` along it, by central differences."""
    found = []
    for i, t in enumerate(at):
        v = torch.randn(t.shape, generator=torch.Generator().manual_seed(i), dtype=t.dtype)
        v = v / v.norm()
        up, down = ([s + sign * eps * v if j == i else s for j, s in enumerate(at)] for sign in (1, -1))
        found.append((v, (f(up) - f(down)) / (2 * eps)))
    return found


@pytest.mark.parametrize("n", [5, 40])  # one that is decomposed whole, one that is not
def test_gradient_of_a_layer_is_that_of_its_constant(n):
    at = [*weights(), torch.randn(n, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64)]

    def truth(t: list[Tensor]) -> float:
        return hs.lipschitz(attention(t[:4]), t[4], solver=hs.DenseSVD()).value

    leaves = [t.clone().requires_grad_() for t in at]
    sigma = hs.smoothness(attention(leaves[:4]), leaves[4])
    assert sigma.item() == pytest.approx(truth(at), rel=1e-9)
    for g, (v, slope) in zip(torch.autograd.grad(sigma, leaves), slopes(truth, at), strict=True):
        assert float((g * v).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-6)


def test_gradient_of_a_function_with_norms_and_fused_attention():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, batch_first=True, dtype=torch.float64).train()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    sigma = hs.smoothness(layer, x, batched=True)
    assert sigma.shape == (2,)
    assert layer.training
    alone = [hs.lipschitz(lambda t: layer.eval()(t[None])[0], row).value for row in x]
    layer.train()
    assert sigma.tolist() == pytest.approx(alone, rel=1e-8)
    (g,) = torch.autograd.grad(sigma.sum(), layer.self_attn.in_proj_weight)
    with torch.no_grad():
        v = torch.randn_like(g) / g.numel() ** 0.5
        ends = []
        for sign in (1e-5, -2e-5):
            layer.self_attn.in_proj_weight.add_(sign * v)
            ends.append(float(hs.smoothness(layer, x, batched=True).sum()))
    assert float((g * v).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6, abs=1e-7)


def test_a_warm_start_follows_weights_that_move():
    w, state = weights(16), hs.WarmStart()
    x = torch.randn(30, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    value, truth = torch.zeros(()), 0.0
    for step in range(8):
        w = [t * (1 + 0.002 * step) for t in w]
        value = hs.smoothness(attention(w), x, state)
        truth = hs.lipschitz(attention(w), x, tol=1e-6).value
        assert value.item() <= truth * (1 + 1e-5)
    assert value.item() == pytest.approx(truth, rel=1e-2)


def test_descent_on_the_penalty_brings_the_constant_down():
    leaves = [t.requires_grad_() for t in weights()]
    x, state = torch.randn(6, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64), hs.WarmStart()
    first = hs.smoothness(attention(leaves), x).item()
    for _ in range(30):
        grads = torch.autograd.grad(hs.smoothness(attention(leaves), x, state), leaves)
        with torch.no_grad():
            for t, g in zip(leaves, grads, strict=True):
                t.sub_(0.02 * g)
    assert hs.lipschitz(attention([t.detach() for t in leaves]), x).value < 0.8 * first


def gpt() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=8, n_head=2, n_positions=8, vocab_size=12, bos_token_id=0, eos_token_id=0)
    model = GPT2Model(config).double().train()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.ndim > 1 else 1)
    return model


def test_penalty_reaches_all_weights_before_a_layer():
    model, ids = gpt(), torch.tensor([[1, 5, 2, 7, 3], [4, 4, 9, 0, 11]])
    penalty = hs.SmoothnessPenalty(model, target=0.1, layers=[1], products=40)
    loss = penalty(input_ids=ids)
    loaded = hs.load(model)
    truth = [loaded.measure(layer=1, ids=row.tolist(), tol=1e-6).value for row in ids]
    assert loss.item() == pytest.approx(sum(t / 0.1 - 1 for t in truth) / 2, rel=1e-4)
    assert penalty.values[1] == pytest.approx(max(truth), rel=1e-4)
    places = {"wte": model.wte.weight, "qkv": model.h[1].attn.c_attn.weight, "before": model.h[0].mlp.c_fc.weight}
    grads = torch.autograd.grad(loss, list(places.values()))
    penalty.products = 4  # enough from where it is
    for p, g in zip(places.values(), grads, strict=True):
        v = torch.randn(p.shape, generator=torch.Generator().manual_seed(3), dtype=p.dtype)
        v = v / v.norm()
        ends = []
        with torch.no_grad():
            for move in (1e-5, -2e-5):
                p.add_(move * v)
                ends.append(penalty(input_ids=ids).item())
            p.add_(1e-5 * v)
        assert float((g * v).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_gradient_where_a_model_turns_gradients_off_on_the_way():
    """As transformers does where it computes phases."""
    torch.manual_seed(0)
    size: dict[str, Any] = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "vocab_size": 12,
    }
    model: Any = LlamaModel(LlamaConfig(**size, bos_token_id=0, eos_token_id=0)).double().train()
    penalty, ids = hs.SmoothnessPenalty(model, target=1e-4, layers=[1], products=200), torch.tensor([[1, 5, 2, 7, 3]])
    loss, weight = penalty(input_ids=ids), model.layers[0].mlp.up_proj.weight
    truth = hs.load(model).measure(layer=1, ids=ids[0].tolist(), tol=1e-6).value
    assert loss.item() == pytest.approx(truth / 1e-4 - 1, rel=1e-4)
    (g,) = torch.autograd.grad(loss, weight)
    v = torch.randn(g.shape, generator=torch.Generator().manual_seed(3), dtype=g.dtype)
    ends = []
    with torch.no_grad():
        for move in (1e-2, -2e-2):  # inside, norms are taken in float32
            weight.add_(move * v)
            ends.append(penalty(input_ids=ids).item())
    assert float((g * v).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-2, rel=1e-3)


def test_penalty_is_zero_below_its_target_and_leaves_the_model_alone():
    model, ids = gpt().float(), torch.tensor([[1, 5, 2]])
    state = torch.random.get_rng_state()
    penalty = hs.SmoothnessPenalty(model, target=1e6, rows=1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = penalty(input_ids=ids.repeat(3, 1))
    assert loss.item() == 0
    loss.backward()
    assert all(p.grad is None or not bool(p.grad.any()) for p in model.parameters())
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training
    assert len(penalty(input_ids=ids, attention_mask=torch.tensor([[1, 1, 0]])).shape) == 0


def test_bad_input():
    x = torch.ones(3, 4)
    with pytest.raises(hs.HowSmoothError, match="expected a target above 0, got 0"):
        hs.SmoothnessPenalty(gpt(), target=0)
    with pytest.raises(hs.HowSmoothError, match="expected a batch"):
        hs.SmoothnessPenalty(gpt(), target=1.0)()
    with pytest.raises(hs.HowSmoothError, match="no derivative in x"):
        hs.smoothness(lambda t: t.detach(), x)
    with pytest.raises(hs.HowSmoothError, match="WarmStart"):
        hs.smoothness(lambda t: t, x, {})  # pyright: ignore[reportArgumentType]
    with pytest.raises(hs.HowSmoothError, match="finite"):
        hs.smoothness(lambda t: t, x * torch.nan)


def test_layers_asked_at_once_are_those_asked_alone():
    """Each layer's constant depends on all layers before it, and its products on none of them."""
    model, ids = gpt(), torch.tensor([[1, 5, 2, 7, 3]])
    together = hs.SmoothnessPenalty(model, target=1e-3, products=30)
    whole = together(input_ids=ids)
    parts = [hs.SmoothnessPenalty(model, target=1e-3, layers=[k], products=30)(input_ids=ids) for k in range(2)]
    assert whole.item() == pytest.approx(sum(p.item() for p in parts) / 2, rel=1e-9)
    weights = [p for name, p in model.named_parameters() if "ln_f" not in name and "h.1.mlp" not in name]
    ours, theirs = (torch.autograd.grad(t, weights, allow_unused=True) for t in (whole, (parts[0] + parts[1]) / 2))
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


class Beside(nn.Module):
    """A block that may add something to what it gives."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)

    def forward(self, x: torch.Tensor, beside: torch.Tensor | float = 0.0) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0] + beside


class Past(nn.Module):
    """The second block knows of the first one past the tokens that enter it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Beside() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        return self.blocks[1](first.sin(), beside=first.square())


def test_layers_that_know_of_each_other_are_asked_one_by_one():
    torch.manual_seed(0)
    model, x = Past(), 3 * torch.randn(1, 5, 8, dtype=torch.float64)
    penalty = hs.SmoothnessPenalty(model, target=1e-3, map="block", products=60)
    whole = penalty(x)
    parts = [hs.SmoothnessPenalty(model, target=1e-3, layers=[k], map="block", products=60)(x) for k in range(2)]
    assert whole.item() == pytest.approx(sum(p.item() for p in parts) / 2, rel=1e-9)
    weights = [p for p in model.parameters() if p.ndim > 1]
    ours, theirs = (torch.autograd.grad(t, weights) for t in (whole, (parts[0] + parts[1]) / 2))
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


class InPlace(nn.Module):
    """Blocks that write into what attention gave, or into what it got."""

    def __init__(self, into: str):
        super().__init__()
        self.into = into
        self.blocks = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = 1.0 * x
            y = block(x, x, x, need_weights=False)[0]
            if self.into == "output":
                y *= 3
                x = x + y
            elif self.into == "input":
                x += 3 * y
            else:
                x = x + 3 * y
        return x


@pytest.mark.parametrize("into", ["output", "input"])
def test_models_that_write_in_place(into: str):
    torch.manual_seed(0)
    plain, x = InPlace("neither"), torch.randn(1, 5, 8, dtype=torch.float64)
    writes = InPlace(into)
    writes.load_state_dict(plain.state_dict())
    wanted, found = (hs.SmoothnessPenalty(model, target=1e-3, products=30)(x) for model in (plain, writes))
    assert found.item() == pytest.approx(wanted.item(), rel=1e-9)


@pytest.mark.slow
def test_other_padding_and_other_shapes_never_exceed_the_constant():
    model = gpt()
    penalty, loaded = hs.SmoothnessPenalty(model, target=1e-9, products=0, layers=[0]), hs.load(model)
    batches = [([1, 5, 2, 7, 3, 9], 6), ([1, 5, 2, 7, 3, 9], 3), ([1, 5, 2, 7], 4), ([4, 4, 9, 0, 11, 2], 6)]
    for ids, real in batches:
        mask = torch.tensor([[1] * real + [0] * (len(ids) - real)])
        penalty(input_ids=torch.tensor([ids]), attention_mask=mask)
        truth = loaded.measure(layer=0, ids=ids[:real], tol=1e-6).value
        assert 0.2 * truth < penalty.values[0] <= truth * (1 + 1e-9)


def test_a_batch_that_is_not_finite_is_not_carried_over():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(1, 5, 8, dtype=torch.float64)
    penalty = hs.SmoothnessPenalty(model, target=1e-3)
    before = [penalty(x).item() for _ in range(20)][-1]
    assert math.isnan(penalty(torch.full_like(x, math.nan)).item())
    assert [penalty(x).item() for _ in range(20)][-1] == pytest.approx(before, rel=1e-6)


def test_modules_with_backward_hooks_hear_nothing_of_a_replay():
    model, ids, heard = gpt(), torch.tensor([[1, 5, 2, 7, 3]]), []
    model.h[0].mlp.register_full_backward_hook(lambda module, before, after: heard.append(after[0].norm()))
    loss = hs.SmoothnessPenalty(model, target=1e-3)(input_ids=ids)
    loss.backward()
    assert not heard
    assert model.h[0].mlp.c_fc.weight.grad.norm() > 0


def test_gradient_reaches_biases_and_sinks():
    """Positions' biases and sinks are weights too: `hs.smoothness` of the layer says what the slope is."""
    torch.manual_seed(0)
    model: Any = Biased()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    penalty = hs.SmoothnessPenalty(model, target=1e-3, products=60)
    (g,) = torch.autograd.grad(penalty(x), model.blocks[0].table)
    v = torch.randn(g.shape, generator=torch.Generator().manual_seed(1), dtype=g.dtype)
    ends = []
    with torch.no_grad():
        for move in (1e-5, -2e-5):
            model.blocks[0].table.add_(move * v)
            ends.append(hs.lipschitz(lambda t: model.blocks[0].attend(t[None])[0], x[0], solver=hs.DenseSVD()).value / 1e-3)
    assert float((g * v).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4)


class Biased(nn.Module):
    """A block with a learned bias on its logits."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([_BiasedBlock()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


class _BiasedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)
        self.table = nn.Parameter(torch.randn(2, 5, 5, dtype=torch.float64))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.table)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attend(x)
