"""Every kind of attention on measures: as on tokens, whatever the masses; and splitting, as on doubled tokens."""

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.kernels.kinds import L2, Cosine, Differential, Hard, Kind, Linear, Sigmoid, Sinkhorn, Softmax
from howsmooth.maps import Attention
from howsmooth.maps.atoms import counted

F64 = torch.float64
COUNTS = torch.tensor([1, 2, 3, 2])
ON_MEASURES = [
    Softmax(),
    L2(),
    L2(tied=True),
    Cosine(epsilon=0.1),
    Cosine(epsilon=0.1, values=False),
    Linear(),
    Linear("relu"),
    Sinkhorn(2),
    Sinkhorn(3),
    Sinkhorn(None),
    Differential(0.5),
    Differential(0.5, epsilon=0.1),
    Hard(),
]


def layer_of(kind: Kind, **options) -> Attention:
    """Two heads with biases, grouped where the kind allows it."""
    r = torch.Generator().manual_seed(3)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=r, dtype=F64)

    groups = 2 if isinstance(kind, L2) and kind.tied else 1
    w_k = None if groups == 2 else weight(2, 3)
    return Attention(
        weight(4, 3), w_k, weight(2 * groups, 3), weight(3, 4), heads=2, kv_heads=groups, b_q=weight(4),
        b_v=weight(2 * groups), kind=kind, **options,
    )  # fmt: skip


def tokens(n: int = 4) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(1), dtype=F64)


@pytest.mark.parametrize("kind", [Sigmoid(), Sigmoid(0.4), Linear(normalized=False), Hard(2)], ids=repr)
def test_counts_are_tokens_written_as_often(kind: Kind):
    """Of kinds that count tokens, which are no maps of measures."""
    attn, x, index = layer_of(kind), tokens(), torch.arange(4).repeat_interleave(COUNTS)
    got = counted(attn, x[None], COUNTS[None].double())[0]
    assert torch.allclose(got[index], attn(x[index]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ON_MEASURES, ids=repr)
def test_a_measure_is_tokens_written_as_often_as_they_weigh(kind: Kind):
    attn, x = layer_of(kind), tokens()
    mu = hs.Measure(x, COUNTS / COUNTS.sum().double())
    index = torch.arange(4).repeat_interleave(COUNTS)
    assert torch.allclose(attn(mu).points[index], attn(x[index]), rtol=1e-11, atol=1e-11)
    assert torch.allclose(attn(mu.split(2)).points[2], attn(mu).points[2], rtol=1e-11, atol=1e-11)
    J = attn.linearize(x[index][None])[1].dense()[0]
    spread = torch.zeros(8, 4, dtype=F64).index_put((torch.arange(8), index), COUNTS[index].double().rsqrt())
    wide = torch.kron(spread, torch.eye(3, dtype=F64))
    truth = float(torch.linalg.matrix_norm(wide.mT @ J @ wide, ord=2))
    assert hs.splitting(attn, mu).moved.value == pytest.approx(truth, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ON_MEASURES, ids=repr)
def test_splitting_is_that_of_doubled_tokens(kind: Kind):
    attn, x = layer_of(kind), tokens()
    ours, truth = hs.splitting(attn, x), hs.splitting(lambda t: attn(t), x)
    assert ours.moved.value == pytest.approx(truth.moved.value, rel=1e-8)
    assert ours.split.value == pytest.approx(truth.split.value, rel=1e-8, abs=1e-12)
    assert torch.allclose(ours.norms.double(), truth.norms.double(), rtol=1e-7, atol=1e-12)
    assert ours.split.upper >= ours.split.lower


def test_splitting_beside_a_sink():
    """Halves weigh half: a sink stays as heavy beside doubled tokens if its logit grows by log 2."""
    x, sink = tokens(), torch.tensor([0.3, -1.0], dtype=F64)
    doubled = layer_of(Softmax(sink + torch.log(torch.tensor(2.0, dtype=F64))))
    ours, truth = hs.splitting(layer_of(Softmax(sink)), x), hs.splitting(lambda t: doubled(t), x)
    assert ours.split.value == pytest.approx(truth.split.value, rel=1e-9)
    assert ours.moved.value == pytest.approx(truth.moved.value, rel=1e-9)


@pytest.mark.parametrize("kind", [L2(), Cosine(epsilon=0.1), Linear(), Differential(0.5), Hard()], ids=repr)
def test_masked_measures(kind: Kind):
    attn, x = layer_of(kind, causal=True), tokens()
    assert torch.allclose(attn(hs.Measure.from_tokens(x, causal=True)).points, attn(x), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Sigmoid(), "do not sum to one"),
        (Linear(normalized=False), "do not sum to one"),
        (Softmax(torch.zeros(2)), "as much as one token"),
        (Hard(2), "counts the tokens"),
    ],
    ids=repr,
)
def test_kinds_that_are_no_maps_of_measures(kind: Kind, why: str):
    with pytest.raises(hs.HowSmoothError, match=why):
        layer_of(kind)(hs.Measure(tokens()))


@pytest.mark.parametrize("kind", [Sigmoid(), Linear(normalized=False)], ids=repr)
def test_kinds_whose_tokens_cannot_be_split(kind: Kind):
    with pytest.raises(hs.HowSmoothError, match="count tokens"):
        hs.splitting(layer_of(kind), tokens())


def test_refusals_of_sinkhorn():
    with pytest.raises(hs.HowSmoothError, match="without window"):
        hs.splitting(layer_of(Sinkhorn(3), window=2), tokens())
    far = 300 * tokens()
    with pytest.raises(hs.HowSmoothError, match="balance"):
        layer_of(Sinkhorn(None))(hs.Measure(far))
