"""Plain torch modules: what calls torch's attention is cut out, what writes its own falls back, and all are right."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.models import FallbackWarning
from problems.zoo import randomize

WIDTH, N = 8, 6


def tokens(seed: int = 0, n: int = N) -> Tensor:
    return torch.randn(1, n, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Mine(nn.Module):
    """Attention as people write it; `kind` says how."""

    def __init__(self, kind: str = "plain"):
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-1)
        if self.kind == "early name":
            o = scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.kind == "mask":
            o = functional.scaled_dot_product_attention(q, k, v, attn_mask=~hidden, scale=0.7)
        elif self.kind == "grouped":
            o = functional.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)
        elif self.kind == "twice":
            o = functional.scaled_dot_product_attention(q, k, v) - 0.5 * functional.scaled_dot_product_attention(k, q, v)
        elif self.kind == "three axes":
            o = functional.scaled_dot_product_attention(q[0], k[0], v[0])[None]
        elif self.kind == "gate":
            o = functional.scaled_dot_product_attention(q, k, v) * torch.sigmoid(v)
        elif self.kind == "bias of the input":
            o = functional.scaled_dot_product_attention(q, k, v, attn_mask=torch.tanh(x @ x.mT)[:, None])
        elif self.kind == "by hand":
            o = torch.softmax(q @ k.mT, -1) @ v
        else:
            o = functional.scaled_dot_product_attention(q, k, v)
        y = self.out(o.transpose(1, 2).flatten(2))
        return self.norm(x + y) if self.kind == "residual" else y


class Stack(nn.Module):
    """Two blocks in a list, whose residuals are added outside of their modules."""

    def __init__(self, kind: str):
        super().__init__()
        self.blocks = nn.ModuleList(Mine(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def norm_of(f, x: Tensor) -> float:
    jacobian = torch.autograd.functional.jacobian(lambda t: f(t[None])[0], x[0])
    assert isinstance(jacobian, Tensor)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x[0].numel()), 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["plain", "early name", "mask", "grouped", "twice", "three axes", "gate", "residual", "by hand"]
)
def test_modules_that_call_torchs_attention(kind: str):
    module = randomize(Stack(kind)).double()
    x = tokens()
    second = x + module.blocks[0](x)
    captured = hs.load(module).capture(inputs=x)
    got = captured.measure(1, "block")
    assert got.cut
    assert captured.num_layers == 2
    assert got.value == pytest.approx(norm_of(lambda t: t + module.blocks[1](t), second.detach()), rel=1e-9)
    alone = captured.measure(1, "update").value
    assert alone == pytest.approx(norm_of(module.blocks[1], second.detach()), rel=1e-9)
    assert captured.measure(0, "model").value == pytest.approx(norm_of(module, x), rel=1e-9)
    if kind != "residual":
        assert captured.measure(1).value == pytest.approx(alone, rel=1e-12)
    else:  # attention ends at the projection, whatever the module adds to it
        plain = Mine()
        plain.load_state_dict(module.blocks[1].state_dict())
        assert captured.measure(1).value == pytest.approx(norm_of(plain.double(), second.detach()), rel=1e-9)


def test_attention_of_its_own_falls_back_and_is_right():
    module = randomize(Mine("bias of the input")).double()
    with pytest.warns(FallbackWarning, match="Mine"):
        got = hs.load(module).measure(inputs=tokens(), layer=0)
    assert not got.cut
    assert got.logits is None
    assert got.value == pytest.approx(norm_of(module, tokens()), rel=1e-9)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", [None, "boolean", "float", "padding"])
def test_multihead_attention(batch_first: bool, mask: str | None):
    module = randomize(nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)).double()
    later = torch.ones(N, N, dtype=torch.bool).triu(1)
    extra = {
        None: {},
        "boolean": {"attn_mask": later},
        "float": {"attn_mask": torch.randn(N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(3))},
        "padding": {"key_padding_mask": torch.arange(N)[None] >= N - 2},
    }[mask]
    x = tokens() if batch_first else tokens().transpose(0, 1)

    def f(t: Tensor) -> Tensor:
        t = t if batch_first else t.transpose(0, 1)
        y = module(t, t, t, need_weights=True, **extra)[0]
        return y if batch_first else y.transpose(0, 1)

    got = hs.load(module).measure(inputs={"query": x, "key": x, "value": x, **extra}, layer=0)
    assert got.cut
    assert got.value == pytest.approx(norm_of(f, tokens()), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_encoder_layers(norm_first: bool, depth: int):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, norm_first=norm_first)
    module = layer if depth == 1 else nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    module = randomize(module).double()
    blocks = [module] if depth == 1 else list(module.layers)  # pyright: ignore[reportCallIssue, reportArgumentType]
    x = tokens()
    captured = hs.load(module).capture(inputs=x)
    assert captured.num_layers == depth
    for i, block in enumerate(blocks):
        assert captured.measure(i, "block").value == pytest.approx(norm_of(block, x), rel=1e-9)
        entering = block.norm1(x) if norm_first else x
        attention = captured.measure(i)
        assert attention.cut
        assert attention.value == pytest.approx(norm_of(lambda t, b=block: b.self_attn(t, t, t)[0], entering), rel=1e-9)
        x = block(x).detach()


def test_code_that_knows_no_float64():
    class Single(Mine):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x @ torch.eye(WIDTH))

    module = randomize(Single())
    got = hs.load(module).measure(inputs=tokens().float(), layer=0, map="block")
    assert got.cut
    assert got.estimate.precision == "float32"
    assert got.value == pytest.approx(norm_of(module, tokens().float()), rel=1e-4)
    large = tokens(n=600).float()  # past the size that is decomposed
    assert hs.load(module).measure(inputs=large, layer=0, map="block", tol=1e-2).estimate.precision == "float32"


def test_training_mode_and_settings_come_back():
    module = randomize(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.5, batch_first=True)).double().train()
    module.dropout1.eval()
    attention = functional.scaled_dot_product_attention
    first = hs.load(module).measure(inputs=tokens(), layer=0, map="block").value
    assert hs.load(module).measure(inputs=tokens(), layer=0, map="block").value == first  # dropout is off
    assert module.training
    assert not module.dropout1.training
    assert torch.backends.mha.get_fastpath_enabled()
    assert functional.scaled_dot_product_attention is attention
    assert not module._forward_hooks
    assert all(p.requires_grad for p in module.parameters())


def test_a_module_is_left_alone_by_an_error():
    module = randomize(Mine()).double()
    with pytest.raises(BadInputError, match="got RuntimeError from it") as caught:
        hs.load(module).measure(inputs=torch.ones(1, 3, WIDTH + 1), layer=0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (tokens(), {"layer": 1}, "layer from 0 to 0"),
        (tokens(), {"layer": 0, "map": "normed"}, "normalises before"),
        (tokens(), {"layer": 0, "map": "mlp"}, "expected a map among"),
    ],
)
def test_refusals(inputs: Tensor, options: dict, message: str):
    module = randomize(nn.MultiheadAttention(WIDTH, 2, batch_first=True)).double()
    with pytest.raises(BadInputError, match=message):
        hs.load(module).measure(inputs=inputs, **options)


def test_heads_before_a_projection_that_is_no_module():
    module = randomize(nn.MultiheadAttention(WIDTH, 2, batch_first=True)).double()

    def heads(x: Tensor) -> Tensor:
        q, k, v = (x @ module.in_proj_weight.mT + module.in_proj_bias).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    got = hs.load(module).measure(inputs=tokens(), layer=0, map="heads")
    assert got.value == pytest.approx(norm_of(heads, tokens()), rel=1e-9)


def test_no_attention():
    with pytest.raises(BadInputError, match="with attention or with a list of blocks"):
        hs.load(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())).measure(inputs=tokens().float(), layer=0)


def test_cross_attention_is_no_layer():
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.other = (nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            x = x + self.own(x, x, x)[0]
            return x + self.other(x, memory, memory)[0]

    module = randomize(Cross()).double()
    memory = tokens(1, n=N + 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured = hs.load(module).capture(inputs=(tokens(), memory))
        assert captured.names == ("own",)
        assert captured.measure(0, "model").value == pytest.approx(norm_of(lambda t: module(t, memory), tokens()), rel=1e-9)


class Latent(nn.Module):
    """Learned tokens enter the first block: a weight as it is, or a part of one."""

    def __init__(self, taken: str):
        super().__init__()
        self.taken = taken
        self.latents = nn.Parameter(torch.zeros(1, N + 2 if taken == "part" else N, WIDTH))
        self.blocks = nn.ModuleList([Mine("residual"), Mine("residual")])
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.latents[:, :N] if self.taken == "part" else self.latents
        for block in self.blocks:
            h = block(h)
        return h + self.inner(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("taken", ["whole", "part"])
def test_measuring_a_model_leaves_its_learned_tokens(taken: str, dtype: torch.dtype):
    module = randomize(Latent(taken)).to(dtype)
    x = tokens().to(dtype)
    before = {k: t.clone() for k, t in module.state_dict().items()}
    h = module.latents.detach().double()[:, :N]
    double = copy.deepcopy(module).double()
    truth = norm_of(lambda t: double.blocks[1](double.blocks[0](t)), 2 * h)
    captured = hs.load(module).capture(inputs=x)
    assert captured.measure(0, "model", factor=2.0).value == pytest.approx(truth, rel=1e-9)
    captured.map(0, "model").value(torch.zeros(1, N, WIDTH, dtype=torch.float64))
    assert all(torch.equal(t, before[k]) for k, t in module.state_dict().items())
