"""What stands between a run and what is recorded of it: numbers read off, state, hooks, casts, writes into the input."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import howsmooth as hs
from problems.modules.base import D, H, N, Own, Pre, Stack, fused, jacobian, largest, merge, plain, seeded, split, tokens

pytestmark = pytest.mark.filterwarnings("ignore::howsmooth.models.FallbackWarning")

X = tokens()


def blocks(*kinds: nn.Module) -> Any:
    return seeded(Stack(*(kinds or (Pre(Own(fused)), Pre(Own(fused)))), norm=False))


def value(model: Any, layer: int = 0, map: Any = "attention", **more: Any) -> float:
    return model.measure(**({"inputs": [X]} | more), layer=layer, map=map, tol=1e-8).value


def attention_of(block: Any, x: Tensor = X) -> float:
    return largest(block.att, block.ln1(x))


class Reading(Pre):
    """A block whose tokens are first changed by `way`, with plain numbers."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__(Own(fused))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.way(x))


class Ids(nn.Module):
    """Token ids, positions if wanted, and one block."""

    def __init__(self, block: nn.Module, positions: bool) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(30, D), nn.ModuleList([block])
        self.positions = nn.Parameter(torch.zeros(N, D)) if positions else None

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if self.positions is not None:
            x = x + self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return x


def cubed(x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.detach().numpy() ** 3)


class First:
    """What it is given first is kept, and multiplied with all that follows."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = x.detach().clone()
        return x * self.kept


DISTINCT, EQUAL = [1, 5, 9, 3, 7], [4] * 5
OF_IDS: dict[str, tuple[Callable[[], Any], list[int], bool]] = {
    "item, no positions": (lambda: lambda x: x * x.norm().item(), DISTINCT, False),
    "item, positions": (lambda: lambda x: x * (1 + 3 * x.mean().item()), DISTINCT, True),
    "item, equal ids": (lambda: lambda x: x * x.norm().item(), EQUAL, True),
    "tolist, no positions": (lambda: lambda x: x * sum(sum(row) for row in x.square().tolist()[0]), DISTINCT, False),
    "numpy": (lambda: cubed, DISTINCT, False),
    "numpy, equal ids": (lambda: cubed, EQUAL, False),
    "numpy, one id": (lambda: cubed, [4], False),
    "kept from the first call, equal ids": (First, EQUAL, False),
}


@pytest.mark.parametrize("name", OF_IDS)
def test_numbers_of_embedded_tokens_are_refused(name: str):
    """Other ids in the same places need not show that a number was read, nor need ids that are all the same."""
    way, ids, positions = OF_IDS[name]
    net = seeded(Ids(Reading(way()), positions))
    with pytest.raises(hs.HowSmoothError, match="expected"):
        value(hs.load(net), map="block", inputs={"input_ids": torch.tensor([ids])})


@pytest.mark.parametrize("name", ["item, no positions", "item, equal ids"])
def test_a_tracker_refuses_numbers_of_embedded_tokens(name: str):
    way, ids, positions = OF_IDS[name]
    net = seeded(Ids(Reading(way()), positions))
    with pytest.raises(hs.HowSmoothError, match="expected"):
        hs.Tracker(net, probe={"input_ids": torch.tensor([ids])}, map="block").update()


class UnitLength(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * D**0.5


class Scaled(Own):
    """Attention times a number that is read off its input."""

    def __init__(self, way: Callable[[Tensor], Any]) -> None:
        super().__init__(fused)
        self.by = way

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.by(x)


BEHIND_NORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[], nn.Module]]] = {
    "item of a mean": (lambda x: 1 + 4 * x.mean().item(), lambda: nn.LayerNorm(D, elementwise_affine=False)),
    "item of a norm": (lambda x: x.norm(dim=-1).mean().item(), UnitLength),
    "float": (lambda x: 1 / float(x.square().mean()), UnitLength),
    "numpy": (lambda x: torch.from_numpy(np.linalg.norm(x.detach().numpy(), axis=-1, keepdims=True)), UnitLength),
    "tolist": (lambda x: sum(v * v for v in x[0, 0].tolist()), UnitLength),
}


@pytest.mark.parametrize("name", BEHIND_NORMS)
def test_numbers_that_a_norm_holds_fixed_are_refused(name: str):
    """They are the same at all inputs of the model, and are not in the map behind the norm."""
    way, norm = BEHIND_NORMS[name]
    block = Pre(Scaled(way))
    block.ln1 = norm()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(hs.HowSmoothError, match="expected"):
        value(hs.load(blocks(block)))


def test_a_number_of_tokens_whose_length_a_model_holds_fixed_is_refused():
    net = nn.Sequential(UnitLength(), blocks(Reading(lambda x: x * x.norm(dim=-1).mean().item())))
    with pytest.raises(hs.HowSmoothError, match="expected"):
        value(hs.load(net), map="block")


class Averaging(Own):
    """A running mean in a tensor that is no buffer."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__(fused)
        self.__dict__["running"] = torch.zeros(D, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.running.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return super().forward(x - self.running)


class Counting(Own):
    """How often it ran, in a tensor that is no buffer."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__(fused)
        self.__dict__["running"] = torch.zeros((), dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.running.add_(1)
        return super().forward(x) * self.running


@pytest.mark.parametrize("kind", [Averaging, Counting])
def test_state_in_attributes_is_refused_and_left_alone(kind: Callable[[], Any]):
    att = kind()
    model = hs.load(blocks(Pre(att)))
    kept, before = att.running, att.running.clone()
    for _ in range(2):
        with pytest.raises(hs.HowSmoothError, match="expected"):
            value(model, map="block")
    assert att.running is kept
    assert torch.equal(kept, before)
    assert not kept.requires_grad


def closures(name: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    kept, calls = torch.zeros(3, 4), []

    def added(z: Tensor) -> Tensor:
        kept.add_(z)
        return kept * z

    def averaged(z: Tensor) -> Tensor:
        kept.mul_(0.9).add_(0.1 * z.detach())
        return (z - kept) ** 2

    def last(z: Tensor) -> Tensor:
        made = kept.clone() * z + z
        kept.copy_(z)
        return made

    def listed(z: Tensor) -> Tensor:
        calls.append(z.detach().clone())
        return torch.stack(calls).sum(0) * z

    return {"added": added, "averaged": averaged, "last": last, "listed": listed}[name], kept


@pytest.mark.parametrize("name", ["added", "averaged", "last", "listed"])
@pytest.mark.parametrize("ask", [hs.lipschitz, lambda f, x: hs.jacobian(f, x).dense()], ids=["lipschitz", "jacobian"])
def test_state_in_closures_is_refused(name: str, ask: Any):
    f, kept = closures(name)
    with pytest.raises(hs.HowSmoothError, match="expected"):
        ask(f, torch.randn(3, 4))


@pytest.mark.parametrize("name", ["added", "averaged", "last"])
@pytest.mark.parametrize("ask", [hs.lipschitz, lambda f, x: hs.jacobian(f, x).dense()], ids=["lipschitz", "jacobian"])
def test_tensors_of_closures_are_no_part_of_a_graph_afterwards(name: str, ask: Any):
    f, kept = closures(name)
    with pytest.raises(hs.HowSmoothError, match="expected"):
        ask(f, torch.randn(3, 4))
    assert not kept.requires_grad
    assert kept.grad_fn is None
    assert type(kept) is Tensor


@pytest.mark.parametrize("where", ["attention", "block"])
def test_hooks_that_change_an_output_are_part_of_the_map(where: str):
    net = blocks()
    block = net.blocks[0]
    (block.att if where == "attention" else block).register_forward_hook(lambda m, i, out: out * 3)
    model = hs.load(net)
    whole = jacobian(block, X)
    assert value(model) == pytest.approx(attention_of(block), rel=1e-6)
    assert value(model, map="block") == pytest.approx(float(torch.linalg.matrix_norm(whole, 2)), rel=1e-6)
    assert value(model, to=0) == pytest.approx(float(torch.linalg.matrix_norm(whole, 2)), rel=1e-6)
    less = whole - torch.eye(N * D, dtype=torch.float64)
    assert value(model, map="update") == pytest.approx(float(torch.linalg.matrix_norm(less, 2)), rel=1e-6)


class Narrow(Own):
    """Attention in bfloat16, whatever the model's precision."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(p(x)).bfloat16() for p in (self.q, self.k, self.v))
        return self.o(merge(F.scaled_dot_product_attention(q, k, v)).to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_casts_to_bfloat16_around_attention(dtype: torch.dtype):
    """What they round is left out of the map; the model's weights are those that it has."""
    net = blocks(Pre(Narrow(plain))).to(dtype)
    exact = Pre(Own(fused)).to(dtype)
    exact.load_state_dict(net.blocks[0].state_dict())
    x = X.to(dtype)
    assert value(hs.load(net), inputs=[x]) == pytest.approx(attention_of(exact.double(), x.double()), rel=1e-4)
    assert next(net.parameters()).dtype is dtype


def test_a_padded_encoder_of_torch():
    """Post-norm, where torch takes a path of its own for padding."""
    net = seeded(nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 16, batch_first=True), 2))
    padding = torch.tensor([[False] * 4 + [True]])
    layer: Any = copy.deepcopy(net).get_submodule("layers.0")

    def attended(t: Tensor) -> Tensor:
        return layer.self_attn(t, t, t, key_padding_mask=padding)[0]

    def block(t: Tensor) -> Tensor:
        y = layer.norm1(t + attended(t))
        return layer.norm2(y + layer.linear2(F.relu(layer.linear1(y))))

    model, given = hs.load(net), {"src": X, "src_key_padding_mask": padding}
    assert value(model, inputs=given) == pytest.approx(largest(attended, X), rel=1e-6)
    assert value(model, map="block", inputs=given) == pytest.approx(largest(block, X), rel=1e-6)


def trained() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()


def of_the_batch(net: Any, x: Tensor) -> Tensor:
    y = net[0](x)
    y = (y - y.mean(0)) / (y.var(0, unbiased=False) + net[1].eps).sqrt()
    return y * net[1].weight + net[1].bias


ASKS: dict[str, Callable[[Any, Tensor], Any]] = {
    "lipschitz": lambda f, x: hs.lipschitz(f, x, tol=1e-8).value,
    "jacobian": lambda f, x: float(torch.linalg.matrix_norm(hs.jacobian(f, x).dense(), 2)),
    "smoothness": lambda f, x: float(hs.smoothness(f, x).detach()),
    "lipschitz_batch": lambda f, x: hs.lipschitz_batch(f, x[None], tol=1e-8)[0].value,
    "certified_radius": lambda f, x: hs.certified_radius(lambda t: f(t).mean(0), x, attack=False) and None,
}


@pytest.mark.parametrize("ask", ["lipschitz", "jacobian", "smoothness"])
def test_a_batch_norm_that_trains_keeps_its_buffers(ask: str):
    """Smoothness is that of a module as it is used, in eval mode."""
    net, x = trained(), torch.randn(3, 4, dtype=torch.float64)
    before = copy.deepcopy(net.state_dict())
    used = copy.deepcopy(net).eval()
    expected = largest(used if ask == "smoothness" else lambda t: of_the_batch(used, t), x)
    assert ASKS[ask](net, x) == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert net.training


@pytest.mark.parametrize("ask", ASKS)
def test_a_function_that_writes_into_its_input_leaves_ours_alone(ask: str):
    x = torch.randn(3, 4, dtype=torch.float64)
    before = x.clone()
    found = ASKS[ask](lambda z: z.mul_(2).tanh(), x)
    assert torch.equal(x, before)
    assert found is None or found == pytest.approx(float((2 / (2 * x).cosh() ** 2).max()), rel=1e-6)
