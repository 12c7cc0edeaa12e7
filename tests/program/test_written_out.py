"""Attention that is written out becomes one operation, in every usual way to write it; near misses stay as they are."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from howsmooth.kernels import attend
from howsmooth.program import Program, Run, record, replay, written_out
from howsmooth.program.attention import Call, MovingTermError, answering, attention
from howsmooth.program.blocks import stream_of
from howsmooth.program.operations import name, order, shape
from howsmooth.program.tracing import Flow
from howsmooth.program.written_out import moving_terms, rewrite

N, D, HEADS = 6, 8, 2
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()
SINK = torch.tensor([0.7, -0.4], dtype=torch.float64)
TAU = torch.tensor([1.5, 0.6], dtype=torch.float64)[:, None, None]
ADDED = torch.zeros(N, N, dtype=torch.float64).masked_fill(~CAUSAL, -torch.inf)
SLOPES = -0.3 * torch.arange(1.0, HEADS + 1)[:, None, None] * torch.arange(N, 0, -1.0)
PLACES = torch.randn(HEADS, N, D // HEADS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
WAYS: dict[str, tuple[Way, tuple[str, ...]]] = {}  # with the kinds of attention that it becomes
MISSES: dict[str, Way] = {}


def way(*kinds: str) -> Callable[[Way], Way]:
    def register(f: Way) -> Way:
        WAYS[f.__name__] = f, kinds
        return f

    return register


def miss(f: Way) -> Way:
    MISSES[f.__name__] = f
    return f


def column(s: Tensor) -> Tensor:
    return SINK.reshape(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], -1)


@way("softmax")
def einsum_softmax(q, k, v):
    p = torch.einsum("bhid,bhjd->bhij", q, k).mul(0.5).masked_fill(~CAUSAL, -torch.inf).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", p, v)


@way("softmax")
def einsum_of_heads_last(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.einsum("b h i j, b j h d -> b h i d", torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k), dim=-1), v)


@way("softmax")
def einsum_with_dots(q, k, v):
    return torch.einsum("...jd,...ij->...id", v, torch.einsum("...id,...jd->...ij", q, k).softmax(-1))


@way("softmax")
def exponentials(q, k, v):
    s = q @ k.mT / 2
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True) @ v


@way("softmax")
def capped(q, k, v):
    return torch.softmax(3 * torch.tanh(q @ k.mT / 3) + ADDED, -1) @ v


@way("softmax")
def scaled_by_head(q, k, v):
    return torch.softmax((functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT) * TAU.to(q), -1) @ v


@way("softmax")
def cosine(q, k, v):
    return torch.softmax(functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT * 4.0, -1) @ v


@way("softmax")
def temperatures(q, k, v):
    s = q @ k.mT * (1 + q.square().mean(-1, keepdim=True)) / k.norm(dim=-1).add(1)[..., None, :]
    return torch.softmax(s, -1) @ v


@way("softmax")
def written_into(q, k, v):
    s = q @ k.mT
    s.mul_(0.5).masked_fill_(~CAUSAL, -torch.inf)
    s += SINK[:, None, None] * torch.arange(N)
    return torch.softmax(s, -1) @ v


@way("softmax")
def two_products(q, k, v):
    return torch.softmax((q[..., :1] @ k[..., :1].mT + q[..., 1:] @ k[..., 1:].mT) * 0.7, -1) @ v


@way("sigmoid")
def sigmoid(q, k, v):
    return torch.sigmoid(q @ k.transpose(-1, -2) / 2 - math.log(N)) @ v


@way("sigmoid")
def sigmoid_masked_before(q, k, v):
    return (q @ k.mT).mul(0.5).masked_fill(~CAUSAL, -torch.inf).sub(1.5).sigmoid() @ v


@way("sigmoid")
def sigmoid_masked_behind(q, k, v):
    p = torch.sigmoid(torch.einsum("bhid,bhjd->bhij", q, k) - 1.0).masked_fill(~CAUSAL, 0.0)
    return torch.einsum("bhij,bhjd->bhid", p, v)


@way("sigmoid")
def sigmoid_times_mask(q, k, v):
    return functional.sigmoid(q @ k.mT + ADDED.masked_fill(~CAUSAL, 0.0)) * CAUSAL / N @ v


@way("sigmoid")
def sigmoid_bias_by_head(q, k, v):
    return torch.sigmoid(q @ k.mT + SINK[:, None, None]) @ v


@way("l2")
def distances(q, k, v):
    return torch.softmax(-torch.cdist(q, k).square() / 2, -1) @ v


@way("l2")
def distances_of_three_axes(q, k, v):
    s = torch.cdist(q[0], k[0], p=2) ** 2 * -0.3
    return torch.bmm(s.masked_fill(~CAUSAL, -torch.inf).softmax(-1), v[0])[None]


@way("l2")
def differences(q, k, v):
    return (-(q[:, :, :, None] - k[:, :, None]).pow(2).sum(-1) * 0.4 + ADDED).softmax(-1) @ v


@way("l2")
def norms_of_differences(q, k, v):
    return (-((q.unsqueeze(-2) - k.unsqueeze(-3)).norm(dim=-1) ** 2) / 2).softmax(-1) @ v


@way("l2")
def expanded(q, k, v):
    s = q.square().sum(-1)[..., None] + k.square().sum(-1)[..., None, :] - 2 * q @ k.mT
    return torch.softmax(-0.5 * s, -1) @ v


@way("l2")
def expanded_masked(q, k, v):
    s = 2 * (q @ k.mT) - q.pow(2).sum(-1, keepdim=True) - k.pow(2).sum(-1, keepdim=True).mT
    return (s / 2.0 + ADDED).softmax(-1) @ v


@way("l2")
def expanded_keys_alone(q, k, v):
    return torch.softmax(q @ k.mT - 0.5 * (k * k).sum(-1).unsqueeze(-2), -1) @ v


@way("softmax")
def sink_behind(q, k, v):
    s = q @ k.mT * 0.5 + ADDED
    s = torch.cat([s, column(s)], dim=-1)
    s = s - s.max(dim=-1, keepdim=True).values
    return torch.softmax(s, -1)[..., :-1] @ v


@way("softmax")
def sink_in_front(q, k, v):
    s = torch.einsum("bhid,bhjd->bhij", q, k) + 0.3
    return torch.cat([column(s), s], -1).softmax(-1)[:, :, :, 1:] @ v


@way("softmax")
def zero_sink(q, k, v):
    return functional.pad(q @ k.mT, (0, 1)).softmax(-1)[..., :N] @ v


@way("softmax")
def one_more_in_the_sum(q, k, v):
    e = torch.exp(q @ k.mT / 2)
    return e / (1 + e.sum(-1, keepdim=True)) @ v


@way("softmax")
def sink_in_the_sum(q, k, v):
    e = (q @ k.mT / 2).exp()
    return (e / (e.sum(dim=-1, keepdim=True) + SINK.to(q).exp()[:, None, None])) @ v


@way("softmax", "softmax")
def differential(q, k, v):
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    p = torch.softmax(q1 @ k1.mT + ADDED, -1) - 0.6 * torch.softmax(q2 @ k2.mT + ADDED, -1)
    return p @ v


@way("softmax", "softmax")
def differential_in_pairs(q, k, v):
    q, k = (t.reshape(1, HEADS, N, 2, -1).transpose(2, 3).flatten(1, 2) for t in (q, k))
    p = torch.softmax(q @ k.mT, -1).view(1, HEADS, 2, N, N)
    return (p[:, :, 0] - SINK[:, None, None] * p[:, :, 1]) @ v


@way("softmax", "sigmoid")
def mixed(q, k, v):
    return (0.5 * torch.softmax(q @ k.mT, -1) + torch.sigmoid(k @ q.mT)) @ v


@way("softmax")
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


@way("l2")
def squares_of_another_size(q, k, v):
    return torch.softmax(q @ k.mT - 0.51 * (k * k).sum(-1).unsqueeze(-2), -1) @ v


@miss
def squares_that_grow(q, k, v):
    grows = 0.5 + torch.tanh(q.mean())
    return torch.softmax(q @ k.mT - grows * (k * k).sum(-1).unsqueeze(-2), -1) @ v


@way("l2")
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


@miss
def no_weights(q, k, v):
    return q @ k.mT @ v


@miss
def half_a_softmax(q, k, v):
    e = torch.exp(q @ k.mT / 2)
    return (e / e.sum(-1, keepdim=True).sqrt()) @ v


@miss
def products_of_features(q, k, v):
    p = (functional.elu(q) + 1) @ (functional.elu(k) + 1).mT
    return p / p.sum(-1, keepdim=True) @ v


@way("softmax")
def torchs_own(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, ADDED, scale=0.3)


@way("softmax")
def torchs_own_causal(q, k, v):
    return functional.scaled_dot_product_attention(q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True)


@way("softmax")
def torchs_own_one_head(q, k, v):
    return functional.scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), CAUSAL)[None]


@way("softmax")
def dropped(q, k, v):
    return functional.dropout(torch.softmax(q @ k.transpose(-1, -2) / 2.0, -1), 0.1, False) @ v


@way("softmax")
def lowest(q, k, v):
    s = torch.matmul(q * 0.5, k.mT).masked_fill(~CAUSAL, torch.finfo(q.dtype).min)
    return torch.matmul(functional.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype), v)


@way("softmax")
def chosen(q, k, v):
    s = torch.where(CAUSAL, q @ k.mT, torch.tensor(-1e30, dtype=q.dtype)) * 0.5
    return s.softmax(3).type_as(q) @ v


@way("softmax")
def floored(q, k, v):
    s = q @ k.mT + torch.zeros(N, N).to(q).masked_fill(~CAUSAL, torch.finfo(torch.float32).min)
    return torch.softmax(torch.max(s, torch.tensor(torch.finfo(torch.float32).min).to(q)), -1) @ v


@way("softmax")
def alibi(q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    s = SLOPES.to(q).baddbmm(q, k.mT, beta=1.0, alpha=0.5).view(1, HEADS, N, N)
    s += torch.zeros(1, 1, N, N).to(q).masked_fill(~CAUSAL, -1e9)
    return torch.bmm(s.softmax(-1).view(HEADS, N, N), v).view(1, HEADS, N, -1)


@way("softmax", "softmax")
def twice(q, k, v):
    p = torch.softmax(q @ k.mT, -1)
    return p @ (p @ v)


@way("softmax")
def channels_first(q, k, v):
    q, k, v = (t.flatten(0, 1).mT for t in (q, k, v))
    p = torch.softmax(torch.bmm(q.permute(0, 2, 1), k), -1)
    return torch.bmm(v, p.permute(0, 2, 1)).mT[None]


@way("softmax")
def keys_in_front(q, k, v):
    return (v.mT @ torch.softmax(k @ q.mT + ADDED.mT, -2)).mT


@way("softmax")
def heads_behind_queries(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    s = torch.einsum("bqhd,bkhd->bqhk", q, k) + ADDED[:, None]
    return torch.einsum("bqhk,bkhd->bqhd", s.softmax(-1), v).transpose(1, 2)


@way("softmax")
def lowered_by_what_is_detached(q, k, v):
    s = q @ k.mT
    e = torch.exp(s - s.detach().amax(-1, keepdim=True)).masked_fill(~CAUSAL, 0.0)
    return e / e.sum(-1, keepdim=True) @ v


@way("softmax")
def windows(q, k, v):
    q, k, v = (t.reshape(3, 2, N // 3, -1).contiguous() for t in (q, k, v))
    mask = torch.zeros(3, 2, 2, dtype=q.dtype)
    mask[1, 0, 1] = -100.0
    s = (q @ k.mT).view(1, 3, 2, 2, 2) + mask[None, :, None]
    return (s.view(3, 2, 2, 2).softmax(-1) @ v).reshape(1, HEADS, N, -1)


@way("softmax")
def keys_that_heads_share(q, k, v):
    k, v = (t[:, :1, None].expand(1, 1, HEADS, N, -1).reshape(1, HEADS, N, -1) for t in (k, v))
    return torch.softmax(q @ k.transpose(2, 3), -1) @ v


@way("softmax")
def scores_of_places(q, k, v):
    return torch.softmax(q @ k.mT * 0.5 + torch.einsum("bhid,hjd->bhij", q, PLACES), -1) @ v


@way("softmax")
def rows_without_keys(q, k, v):
    return torch.softmax((q @ k.mT).masked_fill(~CAUSAL.tril(-1), -torch.inf), -1).nan_to_num() @ v


@way("softmax")
def values_of_one_number(q, k, v):
    return torch.einsum("bhij,bhj->bhi", torch.softmax(q @ k.mT, -1), v[..., 0])[..., None].expand_as(v)


@miss
def inputs_bias_of_rows(q, k, v):
    return torch.softmax((q @ k.mT).relu(), -1) @ v


@miss
def raised_logits(q, k, v):
    return torch.softmax(torch.max(q @ k.mT, torch.tensor(-0.1, dtype=q.dtype)), -1) @ v


@miss
def reweighted(q, k, v):
    p = torch.softmax(q @ k.mT, -1)
    return (p / p.sum(-1, keepdim=True).square() ** 1.5 * (1 + q.mean())).cumsum(-1) @ v


@miss
def talking_heads(q, k, v):
    s = torch.einsum("bhij,hg->bgij", q @ k.mT, TAU[:, 0] * SINK)
    return s.softmax(-1) @ v


@miss
def another_number_at_other_inputs(q, k, v):
    rows = torch.zeros(N, N, dtype=q.dtype).masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -1.2e4)
    return torch.softmax((q @ k.mT + rows) * 1e-4, -1).masked_fill(~CAUSAL, 0.0) @ v


@way("softmax")
def times_a_mask(q, k, v):
    shown = CAUSAL.to(q)
    return (q @ k.mT / 2 * shown - 1e9 * (1 - shown)).softmax(-1) @ v


@miss
def times_a_mask_alone(q, k, v):
    return (q @ k.mT * CAUSAL).softmax(-1) @ v


@miss
def two_layers(q, k, v):
    return torch.sigmoid(q @ PLACES[0].T) @ PLACES[1]


class Written(nn.Module):
    """One layer, its attention written out in one of the ways."""

    def __init__(self, f: Way):
        super().__init__()
        self.f = f
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.f(q, k, v).transpose(1, 2).flatten(2))


def recorded(f: Way, dtype: torch.dtype = torch.float64) -> Program:
    torch.manual_seed(0)
    module = Written(f).double()
    for p in module.parameters():
        p.data.normal_(0, 0.5)
    return record(module.to(dtype), (torch.randn(1, N, D, dtype=torch.float64).to(dtype),))


def kinds(program: Program) -> list[str]:
    return [str(n.kwargs.get("kind", "softmax")) for n in program.nodes if n.target is attention]


def whole(program: Program) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    f = replay.Way.of(stream_of(program), program.inputs, program.outputs).at(Run.recorded(program))
    (x,) = f.start
    return lambda t: f(t)[0], x


def assert_same_function(one: Program, other: Program) -> None:
    (f, x), (g, _) = whole(one), whole(other)
    torch.testing.assert_close(f(x), g(x), rtol=1e-9, atol=1e-12)
    ours, theirs = (torch.autograd.functional.jacobian(h, x) for h in (f, g))
    assert isinstance(ours, Tensor)
    assert isinstance(theirs, Tensor)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    along = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    torch.testing.assert_close(torch.func.jvp(f, (x,), (along,))[1], (theirs * along).sum((-3, -2, -1)), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("called", WAYS)
def test_ways_to_write_it_are_one_operation(called: str):
    f, wanted = WAYS[called]
    program = recorded(f)
    before = [n.name for n in program.nodes]
    new = rewrite(program, stream_of(program))
    assert kinds(new) == list(wanted)
    assert not {name(n) for n in new.nodes} & {"softmax", "scaled_dot_product_attention"}
    flow = stream_of(new)
    assert not [n for n in new.nodes if flow.live(n) and (shape(n) or ())[-2:] == (N, N)]
    assert [n.name for n in program.nodes] == before
    assert_same_function(new, program)


@pytest.mark.parametrize("called", MISSES)
def test_near_misses_stay_as_they_are(called: str):
    program = recorded(MISSES[called])
    new = rewrite(program, stream_of(program))
    assert not kinds(new)
    assert_same_function(new, program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("called", ["lowest", "chosen", "sigmoid_masked_behind", "one_more_in_the_sum", "cosine"])
def test_other_precisions(called: str, dtype: torch.dtype):
    """What is recorded in half or single precision is replayed in double precision all the same."""
    f, wanted = WAYS[called]
    program = recorded(f, dtype)
    new = rewrite(program)
    assert kinds(new) == list(wanted)
    assert_same_function(new, program)


def test_squares_in_single_precision_are_exact():
    program = recorded(expanded, torch.float32)
    new = rewrite(program)
    assert kinds(new) == ["l2"]
    assert_same_function(new, program)


def test_terms_that_move():
    """Without a flow they are read, and replays refuse their derivative; with one they stay written out."""
    program = recorded(sigmoid_bias_of_queries)
    new = rewrite(program)
    assert kinds(new) == ["sigmoid"]
    assert len(moving_terms(new, stream_of(new))) == 1
    assert not moving_terms(new, Flow(new, ()))
    f, x = whole(new)
    torch.testing.assert_close(f(x), whole(program)[0](x), rtol=1e-9, atol=1e-12)
    with pytest.raises(MovingTermError):
        f(x.requires_grad_())


def test_a_reading_that_is_right_at_one_input_alone_is_dropped():
    first: list[float] = []

    def another_beside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first.append(float(q[0, 0, 0, 0]))
        apart = (q[:, :, :1, :1] - first[0]).abs() > 1e-9
        return torch.softmax(q @ k.mT, -1).masked_fill(apart, 0.0) @ v

    assert not kinds(rewrite(recorded(another_beside)))


def test_wrong_operands_are_found_out(monkeypatch: pytest.MonkeyPatch):
    """A reading with another scale is dropped, whichever way it was written."""
    right = written_out.attention

    def wrong(*args, scale: float, **kwargs):
        return right(*args, scale=1.001 * scale, **kwargs)

    for called in ("einsum_softmax", "sigmoid", "differences"):
        program = recorded(WAYS[called][0])
        with monkeypatch.context() as patched:
            patched.setattr(written_out, "attention", wrong)
            new = rewrite(program)
        assert not [n for n in new.nodes if n.target in (wrong, attention)]
        assert_same_function(new, program)


def test_orders_and_values_are_those_of_what_is_replaced():
    program = recorded(heads_behind_queries)
    product = [n for n in program.nodes if name(n) == "einsum"][-1]
    new = rewrite(program)
    (call,) = (n for n in new.nodes if n.target is attention)
    assert order(call) == order(product)
    (turned,) = call.users
    assert shape(turned) == shape(product)
    assert [order(n) for n in new.nodes] == sorted(order(n) for n in new.nodes)
    assert new.scopes == program.scopes
    assert [*new.weights.values()] == [*program.weights.values()]


def test_keys_that_heads_share_are_not_repeated():
    (call,) = (n for n in rewrite(recorded(keys_that_heads_share)).nodes if n.target is attention)
    assert [shape(n) for n in call.all_input_nodes[1:3]] == [(1, 1, N, D // HEADS)] * 2


def test_bands_are_read_from_terms():
    program = recorded(einsum_softmax)
    new = rewrite(program)
    calls: list[Call] = []

    def answer(call: Call) -> Tensor:
        calls.append(call)
        return attend(call.q, call.k, call.v, call.scores)

    f, x = whole(new)
    with answering(answer):
        torch.testing.assert_close(f(x), whole(program)[0](x), rtol=1e-9, atol=1e-12)
    assert [c.scores.mask.causal and c.scores.mask.bias is None for c in calls] == [True]
