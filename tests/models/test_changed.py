"""A model that changed after it was loaded, other inputs of one model, and models in the wrappers of torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import howsmooth as hs
from problems.changes import CHANGES, blocks
from problems.modules.base import D, H, Own, Pre, fused, largest, mlp, tokens

pytestmark = pytest.mark.filterwarnings("ignore::howsmooth.models.FallbackWarning")

X = tokens()


def value(model: Any, layer: int = 0, map: Any = "attention", **more: Any) -> float:
    return model.measure(**({"inputs": [X]} | more), layer=layer, map=map, tol=1e-8).value


def attention_of(block: Any) -> float:
    return largest(block.att, block.ln1(X))


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_changed_is_measured_as_it_is(name: str):
    first, then = CHANGES[name]
    net = blocks()
    first(net)
    model = hs.load(net)
    for change in (lambda net: None, then):
        change(net)
        assert value(model) == pytest.approx(attention_of(net.blocks[0]), rel=1e-6)
        assert value(model, map="block") == pytest.approx(largest(net.blocks[0], X), rel=1e-6)


@pytest.mark.parametrize("name", ["attention replaced", "a bias removed", "weights tied", "weights scaled"])
@pytest.mark.parametrize(("layer", "map"), [(0, "attention"), (1, "block")])
def test_a_capture_of_weights_that_changed_is_refused(name: str, layer: int, map: Any):
    """Its hidden states are those of the old weights."""
    first, then = CHANGES[name]
    net = blocks()
    first(net)
    captured = hs.load(net).capture(inputs=[X])
    captured.measure(layer, map)
    then(net)
    with pytest.raises(hs.HowSmoothError, match="expected"):
        captured.measure(layer, map)


class Masked(Pre):
    """The network runs on the tokens whose first entry is positive."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.ln1(x))
        chosen, out = x[..., 0] > 0, torch.zeros_like(x)
        out[chosen] = self.mlp(self.ln2(x[chosen]))
        return x + out


class Experts(nn.Module):
    """Two experts of four for each token, found by a one-hot code of the choice, as Mixtral's were."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 4), nn.ModuleList([mlp() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).reshape(-1, 4).topk(2, -1)
        flat = x.reshape(-1, D)
        out, mask = torch.zeros_like(flat), F.one_hot(chosen, 4).permute(2, 1, 0)
        for i, expert in enumerate(self.experts):
            rank, rows = torch.where(mask[i])
            out[rows] += expert(flat[rows]) * weights[rows, rank, None]
        return out.view_as(x)


def routed() -> Pre:
    block = Pre(Own(fused))
    block.mlp = Experts()  # pyright: ignore[reportAttributeAccessIssue]
    return block


@pytest.mark.parametrize("build", [lambda: Masked(Own(fused)), routed], ids=["boolean indices", "experts"])
def test_routing_is_that_of_each_input(build: Callable[[], nn.Module]):
    """Another input sends other numbers of tokens each way."""
    net = blocks(build())
    model = hs.load(net)
    for seed in range(21, 25):
        x = tokens(seed=seed)
        assert value(model, map="block", inputs=[x]) == pytest.approx(largest(net.blocks[0], x), rel=1e-6)


@pytest.mark.parametrize("by_name", [False, True])
def test_data_parallel(by_name: bool):
    net = blocks()
    expected = largest(net.blocks[0], X)
    given: dict[str, Any] = {"inputs": {"x": X} if by_name else [X]}
    assert value(hs.load(nn.DataParallel(net)), map="block", **given) == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_and_scripted_modules_are_refused():
    traced: Any = torch.jit.trace(blocks(), X)
    layer = nn.TransformerEncoderLayer(D, H, 16, batch_first=True).double().eval()
    scripted: Any = torch.jit.script(nn.Sequential(layer))
    for module in (traced, scripted):
        with pytest.raises(hs.HowSmoothError, match="expected"):
            value(hs.load(module), map="block")
