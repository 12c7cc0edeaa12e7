"""What a kind says of its weights is true of them."""

import pytest
import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels import Scores
from howsmooth.kernels.base import plain_attention
from howsmooth.kernels.kinds import L2, Cosine, Differential, Hard, Kind, Linear, Sigmoid, Sinkhorn, Softmax
from howsmooth.kernels.masks import Mask

KINDS: dict[str, Kind] = {
    "softmax": Softmax(),
    "sigmoid": Sigmoid(bias=-1.0),
    "L2": L2(),
    "cosine": Cosine(),
    "cosine, values as they are": Cosine(values=False),
    "linear": Linear(),
    "linear, relu": Linear("relu"),
    "sums of features": Linear(normalized=False),
    "sums of relu features": Linear("relu", normalized=False),
    "Sinkhorn": Sinkhorn(),
    "Sinkhorn, limit": Sinkhorn(iterations=None),
    "differential": Differential(0.5),
    "hard": Hard(),
}
each = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def vectors(n: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(n)
    return [torch.randn(1, 1, n, 4, generator=random, dtype=torch.float64) for _ in range(3)]


def outputs(kind: Kind, q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, bias: Tensor | None = None) -> Tensor:
    if kind.parts == 2:  # one head of two parts
        q, k = torch.cat([q, -q], 1), torch.cat([k, k], 1)
    return plain_attention(q, k, v, Scores(scale, mask=Mask(bias=bias), kind=kind))


@each
def test_divided_weights_do_not_count_tokens(kind: Kind):
    q, k, v = vectors(5)
    once = outputs(kind, q, k, v)
    doubled = [torch.cat([t, t], 2) for t in (q, k, v)]
    twice = outputs(kind, doubled[0], doubled[1], doubled[2])[:, :, :5]
    torch.testing.assert_close(twice, once if kind.traits.divided else 2 * once)


@each
def test_smooth_weights_do_not_jump(kind: Kind):
    _, k, v = vectors(4)
    k = k.abs() + 4 * torch.eye(4, dtype=torch.float64)
    ends = [1e-9 * torch.eye(4, dtype=torch.float64)[[i] * 4][None, None] for i in (0, 1)]
    jump = float((outputs(kind, ends[0], k, v) - outputs(kind, ends[1], k, v)).abs().max())
    assert (jump < 1e-2) == kind.traits.smooth


@each
def test_masses_stand_beside_the_logits_of_a_softmax(kind: Kind):
    q, k, v = vectors(5)
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 2.0], dtype=torch.float64).clamp_min(1.0).log()[None, None, None]
    try:
        weighed = outputs(kind, q, k, v, bias=bias)
        k, v = (torch.cat([t, t[:, :, 4:]], 2) for t in (k, v))
        alike = torch.allclose(weighed, outputs(kind, q, k, v))
    except BadInputError:  # no bias, or as many keys as queries
        alike = False
    assert alike == kind.traits.takes_masses


@each
def test_weights_change_with_the_scale(kind: Kind):
    q, k, v = vectors(5)
    try:
        alike = torch.allclose(outputs(kind, q, k, v), outputs(kind, q, k, v, scale=2.0))
    except BadInputError:  # features have none
        alike = True
    assert alike != kind.traits.scaled


def test_plain_softmax():
    assert [name for name, kind in KINDS.items() if kind.traits.plain] == ["softmax"]
    sink = Softmax(torch.zeros(1)).traits
    assert (sink.softmax, sink.plain) == (True, False)
    assert L2(tied=True).traits.tied
    assert not L2().traits.tied
