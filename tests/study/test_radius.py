"""Certified radii: exact where the truth is known, below every attack, refused where nothing can be promised."""

import math

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import HowSmoothError
from howsmooth.settings import Per


def _classifier() -> nn.Module:
    torch.manual_seed(0)

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 12, 0.1, "gelu", batch_first=True, norm_first=True)
            self.enter, self.body, self.leave = nn.Linear(3, 8), layer, nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.leave(self.body(self.enter(x)).mean(1))

    return Small()


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_a_linear_classifier_is_certified_exactly(per: Per):
    w = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]).double()
    x = torch.tensor([[2.0, 0.0], [1.0, 0.5]]).double()
    radius = hs.certified_radius(lambda t: w @ t.mean(0), x, per=per)
    scores = w @ x.mean(0)
    margins = [(float(scores[0] - scores[k]), float((w[0] - w[k]).norm())) for k in (1, 2)]
    # the mean moves as far as every token does, or 1/√2 of what all do together
    truth = min(m / length for m, length in margins) * (1 if per == "token" else math.sqrt(2))
    assert radius.label == 0
    assert truth * 0.999 <= radius.certified <= truth <= radius.attacked <= truth * 1.001


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_below_every_attack(per: Per):
    model, x = _classifier(), torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(1))
    training = model.training
    radius = hs.certified_radius(model, x, per=per)
    assert model.training == training
    assert 0 < radius.certified <= radius.attacked < math.inf
    assert radius.confidence == 1
    assert radius.point is not None
    exact = model.double().eval()
    assert int(exact(x.double()).argmax()) == radius.label
    assert int(exact(radius.point[None]).argmax()) != radius.label
    random = torch.Generator().manual_seed(2)
    for _ in range(50):
        step = torch.randn(4, 3, generator=random).double()
        step *= radius.certified / (step.norm(dim=-1, keepdim=True) if per == "token" else step.norm())
        assert int(exact((x[0] + step)[None]).argmax()) == radius.label


@pytest.mark.slow
def test_tokens_that_may_move_and_a_change_of_the_output():
    model, x = _classifier(), torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(1))
    whole, one = (hs.certified_radius(model, x, per="sequence", tokens=t) for t in (None, [2]))
    assert one.certified > whole.certified
    assert one.point is not None
    assert torch.equal(one.point[[0, 1, 3]], x[0, [0, 1, 3]].double())
    moved = hs.certified_radius(model, x, per="sequence", change=0.05)
    assert moved.label is None
    assert 0 < moved.certified <= moved.attacked


def test_an_answer_that_is_not_given_has_no_radius():
    model, x = _classifier(), torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(1))
    given = hs.certified_radius(model, x, attack=False)
    other = hs.certified_radius(model, x, label=(given.label or 0) ^ 1)
    assert other.certified == other.attacked == 0
    assert str(given.label) in other.reason


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"per": "word"}, "per among"),
        ({"label": 9}, "a label from 0 to 3"),
        ({"label": 1, "change": 0.1}, "either label or change"),
        ({"change": -1}, "a change > 0"),
        ({"tokens": [9]}, "positions from 0 to 3"),
        ({"attack": "yes"}, "attack as True or False"),
        ({"text": "words"}, "expected x for a module"),
    ],
)
def test_bad_input(arguments: dict, said: str):
    x = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(1))
    with pytest.raises(HowSmoothError, match=said):
        hs.certified_radius(_classifier(), x, **arguments)


def test_bad_functions():
    x = torch.ones(2, 3)
    with pytest.raises(HowSmoothError, match="hidden states"):
        hs.certified_radius(lambda t: 2 * t, x)
    with pytest.raises(HowSmoothError, match="two answers or more"):
        hs.certified_radius(lambda t: t.sum()[None], x)
    with pytest.raises(HowSmoothError, match="one input"):
        hs.certified_radius(lambda t: t.mean(1), torch.ones(2, 2, 3))
    single = nn.Linear(3, 2)
    with pytest.raises(HowSmoothError, match="takes float64"):
        hs.certified_radius(lambda t: single(t).mean(0), x)
    with pytest.raises(HowSmoothError, match="expected a model"):
        hs.certified_radius("demo", x)  # pyright: ignore[reportArgumentType]
    with pytest.raises(HowSmoothError, match="NaN"):
        hs.certified_radius(lambda t: t.mean(0), torch.full((2, 3), torch.nan))


@pytest.mark.parametrize("ends", ["as they are", "scaled", "turned round", "shifted"])
def test_what_is_done_to_many_answers_behind_a_matrix(ends: str):
    """Only what is added moves no margin; a factor, or another order, is another question."""
    random = torch.Generator().manual_seed(3)
    w, b = torch.randn(100, 3, generator=random).double(), torch.zeros(100).double()
    b[7] = 4.0
    more = {
        "as they are": lambda z: z,
        "scaled": lambda z: 5 * z,
        "turned round": lambda z: z.flip(-1),
        "shifted": lambda z: z + b,
    }
    x = torch.randn(2, 3, generator=random).double()

    def f(t: Tensor) -> Tensor:
        return more[ends](nn.functional.linear(torch.tanh(t), w, b))

    if ends in ("scaled", "turned round"):
        with pytest.raises(HowSmoothError, match="scores that a matrix makes"):
            hs.certified_radius(f, x)
        return
    radius = hs.certified_radius(f, x)
    assert 0 < radius.certified <= radius.attacked
    for _ in range(200):
        step = torch.randn(2, 3, generator=random).double()
        step *= radius.certified / step.norm(dim=-1, keepdim=True)
        assert int(f(x + step)[-1].argmax()) == radius.label == int(f(x)[-1].argmax())
