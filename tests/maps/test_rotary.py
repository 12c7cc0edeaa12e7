"""Rotary phases and norms of queries and keys: closed form = autodiff = dense, and transformers' own modules."""

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from checks import assert_close, check_batch_equals_loop, check_operator, jacobians
from howsmooth import Attention, HowSmoothError, LayerNorm, RMSNorm, Rotary, lipschitz
from howsmooth.kernels import dispatch
from problems.layers import LayerProblem, gaussian, turned_layers

SINGLE = 1e-6  # transformers' norms and phases are made in float32


def turn_plainly(t: Tensor, position: int, angles: Tensor, interleaved: bool) -> Tensor:
    """One vector turned plane by plane, as the definition reads."""
    out, count = t.clone(), len(angles)
    for p in range(count):
        i, j = (2 * p, 2 * p + 1) if interleaved else (p, p + count)
        c, s = torch.cos(position * angles[p]), torch.sin(position * angles[p])
        out[i], out[j] = c * t[i] - s * t[j], c * t[j] + s * t[i]
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rest", [0, 3])
def test_definition(interleaved, rest):
    width, n = 6, 5
    rotary = Rotary.from_base(width, n, base=100.0, interleaved=interleaved)
    t = gaussian(n, width + rest, seed=0)
    angles = 100.0 ** (-torch.arange(0, width, 2).double() / width)
    truth = torch.stack([turn_plainly(t[i], i, angles, interleaved) for i in range(n)])
    assert_close(rotary.turn(t), truth)
    assert_close(rotary.turn(rotary.turn(t), back=True), t)
    assert_close(rotary.turn(t).norm(dim=-1), t.norm(dim=-1))
    assert rotary.gain == pytest.approx(1.0, abs=1e-14)


def test_planes_are_what_turn_mixes():
    for interleaved in (False, True):
        rotary = Rotary.from_base(4, 3, interleaved=interleaved)
        mixed = torch.stack([rotary.turn(row.expand(3, -1))[2] for row in torch.eye(6).double()]) != 0
        plane = rotary.planes(6)
        assert torch.equal(mixed, plane[:, None] == plane[None])


def test_logits_depend_on_the_distance_alone():
    """Positions moved together change nothing."""
    weights = [gaussian(8, 4, seed=i) for i in range(3)]
    x = gaussian(5, 4, seed=3)
    here, there = (
        Attention(*weights, heads=2, causal=True, rotary=Rotary.from_base(4, torch.arange(5) + shift)) for shift in (0, 17)
    )
    assert_close(here(x), there(x), growth=100)
    plain = Attention(*weights, heads=2, causal=True)
    assert float((here(x) - plain(x)).norm()) > 1e-2


def check_layer(case: LayerProblem) -> None:
    value, op = case.layer.linearize(case.x)
    growth = 1e3 * (1 + float(case.x.norm()) ** 2 * float(case.layer.w_q.norm()))
    assert_close(value, case.layer(case.x), growth=growth)
    check_operator(op, jacobians(case.layer, case.x), growth=growth, scale=float(case.x.norm()))


@pytest.mark.slow
@settings(max_examples=60)
@given(turned_layers())
def test_closed_form_equals_autodiff_equals_dense(case):
    check_layer(case)


@settings(max_examples=15)
@given(turned_layers())
def test_blocked_kernel_gives_the_same(case):
    kept = dispatch.KEPT_BYTES["cpu"]
    dense = case.layer.linearize(case.x)[1].dense()
    dispatch.KEPT_BYTES["cpu"] = 0
    try:
        blocked = case.layer.linearize(case.x)[1].dense()
    finally:
        dispatch.KEPT_BYTES["cpu"] = kept
    assert_close(blocked, dense, growth=1e3 * (1 + float(dense.norm())), scale=1.0)


def test_a_norm_over_all_heads_is_olmos():
    """Queries side by side, normalised, then cut into heads; one head alone is the layer with the others cut off."""
    w_q, w_k, w_v, w_o = (gaussian(rows, d, seed=i) for i, (rows, d) in enumerate([(8, 5), (4, 5), (4, 5), (3, 8)]))
    norms = {"q_norm": LayerNorm(gaussian(8, seed=8), gaussian(8, seed=7), eps=0.1), "k_norm": RMSNorm(gaussian(4, seed=9))}
    layer = Attention(w_q, w_k, w_v, w_o, heads=4, kv_heads=2, causal=True, **norms)
    x = gaussian(6, 5, seed=4)
    q = norms["q_norm"](x @ w_q.mT).unflatten(-1, (4, 2)).transpose(0, 1)
    k = norms["k_norm"](x @ w_k.mT).unflatten(-1, (2, 2)).transpose(0, 1).repeat_interleave(2, 0)
    v = (x @ w_v.mT).unflatten(-1, (2, 2)).transpose(0, 1).repeat_interleave(2, 0)
    o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_close(layer(x), o.transpose(0, 1).flatten(1) @ w_o.mT, growth=100)
    assert layer.coupled
    alone = [layer.head(h) for h in range(4)]
    assert_close(sum((head(x) for head in alone), torch.zeros(())), layer(x), growth=100)
    assert_close(alone[1](x), o[1] @ w_o[:, 2:4].mT, growth=100)


def test_batch_with_its_own_positions_equals_loop():
    positions = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8], [0, 0, 1, 2]])
    weights = [gaussian(8, 3, seed=i) for i in range(3)]
    norms = {"q_norm": RMSNorm(gaussian(8, seed=8), eps=0.1), "k_norm": LayerNorm(gaussian(4, seed=9), eps=0.1)}
    layer = Attention(*weights, heads=2, rotary=Rotary.from_base(4, positions), **norms)
    x = gaussian(3, 4, 3, seed=4)
    whole = layer.linearize(x)[1].dense()
    for b in range(3):
        alone = Attention(*weights, heads=2, rotary=Rotary.from_base(4, positions[b]), **norms)
        assert_close(whole[b : b + 1], alone.linearize(x[b : b + 1])[1].dense(), growth=1e3)
    shared = Attention(*weights, heads=2, rotary=Rotary.from_base(4, 9), **norms)
    check_batch_equals_loop(lambda t: shared.linearize(t)[1], x, growth=1e3)


def test_float32_layer_in_lipschitz():
    layer = Attention(
        *(gaussian(8, 6, seed=i, dtype=torch.float32) for i in range(3)),
        heads=2,
        q_norm=RMSNorm(torch.ones(4)),
        rotary=Rotary.from_base(4, 40, dtype=torch.float32),
    )
    x = gaussian(40, 6, seed=5, dtype=torch.float32)
    estimate = lipschitz(layer, x)
    exact = torch.linalg.matrix_norm(layer.linearize(x.double()[None])[1].dense()[0], 2)
    assert estimate.lower <= float(exact) * (1 + 1e-9)
    assert estimate.value == pytest.approx(float(exact), rel=2e-3)
    assert estimate.upper >= float(exact)


HEADS, KV, HEAD, WIDTH, TOKENS = 4, 2, 8, 20, 7
TINY = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "vocab_size": 11,
    "attention_dropout": 0.0,
}


def module_and_layer(kind: str) -> tuple[nn.Module, nn.Module, Attention]:
    """A tiny random attention module of transformers, its phases, and the same layer of ours."""
    from transformers import LlamaConfig, PhiConfig, Qwen3Config
    from transformers.models.llama import modeling_llama
    from transformers.models.phi import modeling_phi
    from transformers.models.qwen3 import modeling_qwen3

    if kind == "llama":
        config = LlamaConfig(**TINY, attention_bias=True)
        module, phases = modeling_llama.LlamaAttention(config, 0), modeling_llama.LlamaRotaryEmbedding(config)
    elif kind == "qwen3":
        config = Qwen3Config(**TINY)
        module, phases = modeling_qwen3.Qwen3Attention(config, 0), modeling_qwen3.Qwen3RotaryEmbedding(config)
    else:  # half of each head is turned
        config = PhiConfig(hidden_size=HEADS * HEAD, num_attention_heads=HEADS, num_key_value_heads=KV, num_hidden_layers=1)
        config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        module, phases = modeling_phi.PhiAttention(config, 0), modeling_phi.PhiRotaryEmbedding(config)
    config._attn_implementation = "eager"
    module = module.double().eval()
    parts = dict(module.named_parameters())
    with torch.no_grad():
        for i, t in enumerate(parts.values()):
            t.copy_(gaussian(*t.shape, seed=i) / (2.0 if t.ndim == 2 else 1.0))
    parts = {name: t.detach() for name, t in parts.items()}
    out = "o_proj" if "o_proj.weight" in parts else "dense"
    cos, sin = phases(torch.zeros(1), torch.arange(TOKENS)[None])
    planes = cos.shape[-1] // 2
    layer = Attention(
        *(parts[f"{name}.weight"] for name in ("q_proj", "k_proj", "v_proj", out)),
        heads=HEADS,
        kv_heads=KV,
        causal=True,
        b_q=parts.get("q_proj.bias"),
        b_k=parts.get("k_proj.bias"),
        b_v=parts.get("v_proj.bias"),
        b_o=parts.get(f"{out}.bias"),
        q_norm=RMSNorm(parts["q_norm.weight"], eps=1e-6) if kind == "qwen3" else None,
        k_norm=RMSNorm(parts["k_norm.weight"], eps=1e-6) if kind == "qwen3" else None,
        rotary=Rotary(cos[..., :planes].double(), sin[..., :planes].double()),
    )
    return module, phases, layer


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi"])
def test_equals_transformers(kind):
    module, phases, layer = module_and_layer(kind)
    assert layer.rotary is not None
    assert layer.rotary.width == (HEAD // 2 if kind == "phi" else HEAD)
    x = gaussian(2, TOKENS, layer.width, seed=50)
    position = phases(torch.zeros(1), torch.arange(TOKENS)[None])
    hidden = torch.full((TOKENS, TOKENS), -torch.inf, dtype=torch.float64).triu(1)[None, None]

    def theirs(t: Tensor) -> Tensor:
        return module(t, position_embeddings=position, attention_mask=hidden)[0]

    truth = theirs(x).detach()
    assert float((layer(x) - truth).norm()) <= SINGLE * float(truth.norm())
    truth = jacobians(theirs, x)
    assert float((layer.linearize(x)[1].dense() - truth).norm()) <= 10 * SINGLE * float(truth.norm())


W = torch.zeros(8, 4)
REFUSED = {
    "a norm of another width": ({"q_norm": RMSNorm(torch.ones(6))}, "head width 4 or over all heads, 8"),
    "something else": ({"k_norm": torch.ones(4)}, "LayerNorm or RMSNorm"),
    "too wide": ({"rotary": Rotary.from_base(6, 3)}, "at most the head width 4"),
    "a table": ({"rotary": torch.ones(3, 2)}, "as a Rotary"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    options, message = REFUSED[name]
    with pytest.raises(HowSmoothError, match=message):
        Attention(W, W, W, heads=2, **options)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rotary(torch.ones(3), torch.ones(3)), "table"),
        (lambda: Rotary(torch.ones(3, 2), torch.ones(2, 3)), "one shape"),
        (lambda: Rotary(torch.ones(3, 2), torch.full((3, 2), torch.nan)), "finite"),
        (lambda: Rotary.from_base(3, 4), "even"),
        (lambda: Rotary.from_base(4, 0), "positions from 1"),
        (lambda: Rotary.from_base(4, 2, base=-1.0), "positive base"),
        (lambda: Attention(W, W, W, heads=2, rotary=Rotary.from_base(4, 2))(torch.zeros(3, 4)), "at least 3 positions"),
        (
            lambda: Attention(W, W, W, heads=2, rotary=Rotary.from_base(4, torch.zeros(2, 3)))(torch.zeros(4, 3, 4)),
            "4 sequences",
        ),
    ],
)
def test_refuses_tables(build, message):
    with pytest.raises(HowSmoothError, match=message):
        build()
