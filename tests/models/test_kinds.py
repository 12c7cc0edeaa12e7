"""Modules of a user's own with every kind of attention, in the usual ways to write it, and near misses of each."""

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import howsmooth as hs
from checks import PARITY
from howsmooth import kinds
from howsmooth.errors import BadInputError
from howsmooth.kernels.kinds import Kind
from howsmooth.models import FallbackWarning
from howsmooth.models.interface import register
from howsmooth.program import attention
from problems.zoo import ZOO, ids, randomize

N, D, HEADS = 6, 8, 2
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()
SINK = torch.tensor([0.7, -0.4], dtype=torch.float64)
TAU = torch.tensor([1.5, 0.6], dtype=torch.float64)[:, None, None]
ADDED = torch.zeros(N, N, dtype=torch.float64).masked_fill(~CAUSAL, -torch.inf)

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
WAYS: dict[str, tuple[Way, type[Kind] | None]] = {}  # with the kind it is read off as; None where it is cut and no more
MISSES: dict[str, Way] = {}
OTHERS: dict[str, Way] = {}  # that no product of queries and keys is weighed in


def way(kind: type[Kind] | None) -> Callable[[Way], Way]:
    def register(f: Way) -> Way:
        WAYS[f.__name__] = f, kind
        return f

    return register


def miss(f: Way) -> Way:
    MISSES[f.__name__] = f
    return f


def other(f: Way) -> Way:
    OTHERS[f.__name__] = f
    return f


def column(s: Tensor) -> Tensor:
    return SINK.reshape(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], -1)


@way(kinds.Softmax)
def einsum_softmax(q, k, v):
    p = torch.einsum("bhid,bhjd->bhij", q, k).mul(0.5).masked_fill(~CAUSAL, -torch.inf).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", p, v)


@way(kinds.Softmax)
def einsum_of_heads_last(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.einsum("b h i j, b j h d -> b h i d", torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k), dim=-1), v)


@way(kinds.Softmax)
def einsum_with_dots(q, k, v):
    return torch.einsum("...jd,...ij->...id", v, torch.einsum("...id,...jd->...ij", q, k).softmax(-1))


@way(kinds.Softmax)
def exponentials(q, k, v):
    s = q @ k.mT / 2
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True) @ v


@way(kinds.Softmax)
def capped(q, k, v):
    return torch.softmax(3 * torch.tanh(q @ k.mT / 3) + ADDED, -1) @ v


@way(None)  # one scale per head is no field of a layer with one scale; its queries are
def scaled_by_head(q, k, v):
    return torch.softmax((functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT) * TAU.to(q), -1) @ v


@way(kinds.Softmax)
def cosine(q, k, v):
    return torch.softmax(functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT * 4.0, -1) @ v


@way(None)
def temperatures(q, k, v):
    s = q @ k.mT * (1 + q.square().mean(-1, keepdim=True)) / k.norm(dim=-1).add(1)[..., None, :]
    return torch.softmax(s, -1) @ v


@way(kinds.Softmax)
def written_into(q, k, v):
    s = q @ k.mT
    s.mul_(0.5).masked_fill_(~CAUSAL, -torch.inf)
    s += SINK[:, None, None] * torch.arange(N)
    return torch.softmax(s, -1) @ v


@way(kinds.Softmax)
def two_products(q, k, v):
    return torch.softmax((q[..., :1] @ k[..., :1].mT + q[..., 1:] @ k[..., 1:].mT) * 0.7, -1) @ v


@way(kinds.Sigmoid)
def sigmoid(q, k, v):
    return torch.sigmoid(q @ k.transpose(-1, -2) / 2 - math.log(N)) @ v


@way(kinds.Sigmoid)
def sigmoid_masked_before(q, k, v):
    return (q @ k.mT).mul(0.5).masked_fill(~CAUSAL, -torch.inf).sub(1.5).sigmoid() @ v


@way(kinds.Sigmoid)
def sigmoid_masked_behind(q, k, v):
    p = torch.sigmoid(torch.einsum("bhid,bhjd->bhij", q, k) - 1.0).masked_fill(~CAUSAL, 0.0)
    return torch.einsum("bhij,bhjd->bhid", p, v)


@way(kinds.Sigmoid)
def sigmoid_times_mask(q, k, v):
    return functional.sigmoid(q @ k.mT + ADDED.masked_fill(~CAUSAL, 0.0)) * CAUSAL / N @ v


@way(kinds.Sigmoid)
def sigmoid_bias_by_head(q, k, v):
    return torch.sigmoid(q @ k.mT + SINK[:, None, None]) @ v


@way(kinds.L2)
def distances(q, k, v):
    return torch.softmax(-torch.cdist(q, k).square() / 2, -1) @ v


@way(kinds.L2)
def distances_of_three_axes(q, k, v):
    s = torch.cdist(q[0], k[0], p=2) ** 2 * -0.3
    return torch.bmm(s.masked_fill(~CAUSAL, -torch.inf).softmax(-1), v[0])[None]


@way(kinds.L2)
def differences(q, k, v):
    return (-(q[:, :, :, None] - k[:, :, None]).pow(2).sum(-1) * 0.4 + ADDED).softmax(-1) @ v


@way(kinds.L2)
def norms_of_differences(q, k, v):
    return (-((q.unsqueeze(-2) - k.unsqueeze(-3)).norm(dim=-1) ** 2) / 2).softmax(-1) @ v


@way(kinds.L2)
def expanded(q, k, v):
    s = q.square().sum(-1)[..., None] + k.square().sum(-1)[..., None, :] - 2 * q @ k.mT
    return torch.softmax(-0.5 * s, -1) @ v


@way(kinds.L2)
def expanded_masked(q, k, v):
    s = 2 * (q @ k.mT) - q.pow(2).sum(-1, keepdim=True) - k.pow(2).sum(-1, keepdim=True).mT
    return (s / 2.0 + ADDED).softmax(-1) @ v


@way(kinds.L2)
def expanded_keys_alone(q, k, v):
    return torch.softmax(q @ k.mT - 0.5 * (k * k).sum(-1).unsqueeze(-2), -1) @ v


@way(kinds.Softmax)
def sink_behind(q, k, v):
    s = q @ k.mT * 0.5 + ADDED
    s = torch.cat([s, column(s)], dim=-1)
    s = s - s.max(dim=-1, keepdim=True).values
    return torch.softmax(s, -1)[..., :-1] @ v


@way(kinds.Softmax)
def sink_in_front(q, k, v):
    s = torch.einsum("bhid,bhjd->bhij", q, k) + 0.3
    return torch.cat([column(s), s], -1).softmax(-1)[:, :, :, 1:] @ v


@way(kinds.Softmax)
def zero_sink(q, k, v):
    return functional.pad(q @ k.mT, (0, 1)).softmax(-1)[..., :N] @ v


@way(kinds.Softmax)
def one_more_in_the_sum(q, k, v):
    e = torch.exp(q @ k.mT / 2)
    return e / (1 + e.sum(-1, keepdim=True)) @ v


@way(kinds.Softmax)
def sink_in_the_sum(q, k, v):
    e = (q @ k.mT / 2).exp()
    return (e / (e.sum(dim=-1, keepdim=True) + SINK.to(q).exp()[:, None, None])) @ v


@way(None)  # two calls
def differential(q, k, v):
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    p = torch.softmax(q1 @ k1.mT + ADDED, -1) - 0.6 * torch.softmax(q2 @ k2.mT + ADDED, -1)
    return p @ v


@way(None)
def differential_in_pairs(q, k, v):
    q, k = (t.reshape(1, HEADS, N, 2, -1).transpose(2, 3).flatten(1, 2) for t in (q, k))
    p = torch.softmax(q @ k.mT, -1).view(1, HEADS, 2, N, N)
    return (p[:, :, 0] - SINK[:, None, None] * p[:, :, 1]) @ v


@way(None)
def mixed(q, k, v):
    return (0.5 * torch.softmax(q @ k.mT, -1) + torch.sigmoid(k @ q.mT)) @ v


@way(None)
def gated_weights(q, k, v):
    return torch.softmax(q @ k.mT, -1) * torch.sigmoid(q.sum(-1, keepdim=True)) @ v


@miss
def sigmoid_of_something_else(q, k, v):
    return torch.sigmoid((q @ k.mT).sin()) @ v


@miss
def sigmoid_divided(q, k, v):
    p = torch.sigmoid(q @ k.mT)
    return p / p.sum(-1, keepdim=True) @ v


@miss
def sigmoid_of_lowered(q, k, v):
    s = q @ k.mT
    return torch.sigmoid(s - s.amax(-1, keepdim=True)) @ v


@miss
def sigmoid_bias_of_queries(q, k, v):
    return torch.sigmoid(q @ k.mT + q.sum(-1, keepdim=True)) @ v


@miss
def softmax_over_queries(q, k, v):
    return torch.einsum("bhid,bhjd->bhij", q, k).softmax(-2) @ v


@miss
def values_of_queries(q, k, v):
    return torch.einsum("bhij,bhid->bhjd", torch.softmax(q @ k.mT, -1), v)


@miss
def distances_as_they_are(q, k, v):
    return torch.softmax(-(q[:, :, :, None] - k[:, :, None]).norm(dim=-1), -1) @ v


@miss
def distances_in_another_norm(q, k, v):
    return torch.softmax(-((q[:, :, :, None] - k[:, :, None]).abs() ** 3).sum(-1), -1) @ v


@miss
def squares_of_other_keys(q, k, v):
    return torch.softmax(q @ k.mT - 0.5 * (v * v).sum(-1).unsqueeze(-2), -1) @ v


@way(kinds.L2)
def squares_of_another_size(q, k, v):
    return torch.softmax(q @ k.mT - 0.51 * (k * k).sum(-1).unsqueeze(-2), -1) @ v


@miss
def squares_that_grow(q, k, v):
    grows = 0.5 + torch.tanh(q.mean())
    return torch.softmax(q @ k.mT - grows * (k * k).sum(-1).unsqueeze(-2), -1) @ v


@way(kinds.L2)
def squares_and_a_bias(q, k, v):
    return torch.softmax(q @ k.mT - 0.5 * (k * k).sum(-1).unsqueeze(-2) + torch.arange(N) / 4, -1) @ v


@miss
def sink_that_moves(q, k, v):
    s = q @ k.mT
    return torch.cat([s, q.sum(-1, keepdim=True)], -1).softmax(-1)[..., :-1] @ v


@miss
def sink_of_a_value(q, k, v):
    s = q @ k.mT
    return torch.cat([s, column(s)], -1).softmax(-1) @ torch.cat([v, v[..., :1, :]], -2)


@miss
def sink_instead_of_a_key(q, k, v):
    s = q @ k.mT
    return torch.cat([s, column(s)], -1).softmax(-1)[..., 1:] @ v


@miss
def sink_behind_the_largest(q, k, v):
    s = q @ k.mT
    s = s - s.amax(-1, keepdim=True)
    return torch.cat([s, column(s)], -1).softmax(-1)[..., :-1] @ v


@miss
def weights_hidden_behind(q, k, v):
    return torch.softmax(q @ k.mT, -1).masked_fill(~CAUSAL, 0.0) @ v


@miss
def raised_weights(q, k, v):
    return (torch.softmax(q @ k.mT, -1) + 0.1) @ v


@other
def no_weights(q, k, v):
    return q @ k.mT @ v


@miss
def half_a_softmax(q, k, v):
    e = torch.exp(q @ k.mT / 2)
    return (e / e.sum(-1, keepdim=True).sqrt()) @ v


@other
def products_of_features(q, k, v):
    p = (functional.elu(q) + 1) @ (functional.elu(k) + 1).mT
    return p / p.sum(-1, keepdim=True) @ v


class Written(nn.Module):
    """One layer, its attention written out in one of the ways."""

    def __init__(self, f: Way):
        super().__init__()
        self.f = f
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.f(q, k, v).transpose(1, 2).flatten(2))


def built(f: Way) -> tuple[nn.Module, Tensor, float]:
    """A module, an input, and the norm of its dense Jacobian."""
    torch.manual_seed(0)
    module = nn.Sequential(Written(f)).double().eval()
    for p in module.parameters():
        p.data.normal_(0, 0.5)
    x = torch.randn(1, N, D, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(module, x)
    assert isinstance(jacobian, Tensor)
    return module, x, float(torch.linalg.matrix_norm(jacobian.reshape(N * D, N * D), 2))


@pytest.mark.parametrize("name", WAYS)
def test_ways_to_write_it_are_cut(name: str):
    f, kind = WAYS[name]
    module, x, truth = built(f)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        capture = hs.load(module).capture(inputs=x)
        got = capture.measure(0)
    assert got.cut
    assert got.value == pytest.approx(truth, rel=PARITY)
    closed = capture.closed(0)
    assert (closed is None) == (kind is None)
    if closed is not None:
        assert type(closed.kind) is kind
        assert hs.lipschitz(closed, x[0]).value == pytest.approx(truth, rel=PARITY)


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_fall_back_and_are_right(name: str):
    module, x, truth = built(MISSES[name])
    with pytest.warns(FallbackWarning, match="attention of its own"):
        got = hs.load(module).measure(inputs=x, layer=0)
    assert not got.cut
    assert got.value == pytest.approx(truth, rel=PARITY)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_attention_is_measured_as_a_block(name: str):
    module, x, truth = built(OTHERS[name])
    with pytest.raises(BadInputError, match="measure map='block'"):
        hs.load(module).measure(inputs=x, layer=0)
    assert hs.load(module).measure(inputs=x, layer=0, map="block").value == pytest.approx(truth, rel=PARITY)


@pytest.mark.parametrize("name", ["sigmoid", "differences", "sink_behind"])
def test_a_wrong_reading_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch):
    module, x, truth = built(WAYS[name][0])
    right = attention.kind_of

    def wrong(kind: str, sink: Tensor | None, heads: int, shift: float) -> kinds.Kind:
        found = right(kind, sink, heads, shift)
        return kinds.Sigmoid(-1.7) if isinstance(found, kinds.Sigmoid) else kinds.Hard()

    monkeypatch.setattr(attention, "kind_of", wrong)
    with pytest.warns(FallbackWarning):
        got = hs.load(module).measure(inputs=x, layer=0)
    assert got.value == pytest.approx(truth, rel=PARITY)


@pytest.mark.parametrize("name", ["sigmoid", "expanded", "sink_in_the_sum", "scaled_by_head"])
def test_modules_in_float32(name: str):
    module, x, truth = built(WAYS[name][0])
    got = hs.load(module.float()).measure(inputs=x.float(), layer=0)
    assert got.cut
    assert got.value == pytest.approx(truth, rel=1e-5)


class Stack(nn.Module):
    """Layers of several kinds, one that calls torch's function among them."""

    def __init__(self, *ways: Way):
        super().__init__()
        self.layers = nn.ModuleList(Written(f) for f in ways)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("last", [sigmoid_of_something_else, sigmoid], ids=["a miss", "all followed"])
def test_layers_of_several_kinds_keep_their_places(last: Way):
    torch.manual_seed(1)
    module = Stack(differences, functional.scaled_dot_product_attention, last).double().eval()
    x = torch.randn(1, N, D, dtype=torch.float64)
    followed = last is sigmoid
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        capture = hs.load(module).capture(inputs=x)
        got = capture.measure(None, "block")
    assert capture.names == ("layers.0", "layers.1", "layers.2")
    assert [m.cut for m in got] == [True, True, followed]
    for block, m in zip(module.layers, got, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda t, block=block: t + block(t), x)
        assert isinstance(jacobian, Tensor)
        truth = torch.linalg.matrix_norm(jacobian.reshape(N * D, N * D), 2)
        assert m.value == pytest.approx(float(truth), rel=PARITY)
        x = (x + block(x)).detach()


def test_sinks_are_differentiated():
    """A model that runs on the kernels by name trains its sinks as its own code does."""
    model = randomize(ZOO["gpt-oss local"].build()).double()
    model.set_experts_implementation("eager")  # the only one that knows float64
    register()
    gradients = []
    for code in ("eager", "howsmooth"):
        model.set_attn_implementation(code)
        model.zero_grad()
        model(input_ids=ids(), use_cache=False).last_hidden_state.square().sum().backward()
        gradients.append(model.layers[0].self_attn.sinks.grad.clone())
    assert float(gradients[0].abs().max()) > 1e-3
    assert torch.allclose(*gradients, rtol=1e-6)
