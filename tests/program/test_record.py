"""A recorded run: weights by name, in-place writes gone, the module as it was, what a recording cannot know refused."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from howsmooth.errors import BadFunctionError
from howsmooth.program import Layers, Run, Way, ends_of, record
from howsmooth.program.confirm import beside, replayed
from howsmooth.program.operations import name, writes


def x(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Of(nn.Module):
    """A module of a function."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, *args, **kwargs):
        return self.f(*args, **kwargs)


def views(t: Tensor) -> Tensor:
    out = torch.zeros_like(t)
    out[:, :2] = t[:, :2].sin()
    row = out[0]
    out.mul_(2)
    row += 1  # a view that was made before
    out[1:].T[0] = 3
    return out + row


def twice(t: Tensor) -> Tensor:
    y = t + 1
    z = y.view(-1)
    z[1::2].add_(y.flatten()[::2])
    return torch.cat([y.reshape(-1), z])


def masked(t: Tensor) -> Tensor:
    y = t.clone()
    y.masked_fill_(t > 0, -1.0)
    y[t < -1] = 0.5
    y.transpose(0, 1).copy_(y[:, :1].expand(3, 4).T * 1.0)
    return y


@pytest.mark.parametrize("f", [views, twice, masked])
def test_in_place_writes_become_values(f):
    program = record(Of(f), (x(3, 4),))
    assert not any(writes(n) is not None for n in program.nodes)
    for seed in (1, 2):
        other = x(3, 4, seed=seed)
        (ours,) = replayed(program, (other,))
        torch.testing.assert_close(ours, f(other), rtol=1e-13, atol=1e-13)


def test_derivatives_of_in_place_writes():
    program = record(Of(views), (x(3, 4),))
    layers = Layers(program)
    f = Way.of(layers.flow, program.inputs, program.outputs).at(Run.recorded(program))
    (point,) = f.start
    ours = torch.autograd.functional.jacobian(lambda t: f(t)[0], point)
    step = 1e-6 * x(3, 4, seed=5)
    assert isinstance(ours, Tensor)
    torch.testing.assert_close(
        (ours * step).sum((-2, -1)), (views(point + step) - views(point - step)) / 2, rtol=1e-6, atol=1e-12
    )


def test_weights_are_todays():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    program = record(module, (x(2, 4),))
    with torch.no_grad():
        next(module.parameters()).mul_(3)
    torch.testing.assert_close(replayed(program, (x(2, 4),))[0], module(x(2, 4)).detach())


def test_a_weight_of_two_names_is_one():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    module[1].weight = module[0].weight
    program = record(module, (x(2, 4),))
    assert sorted(program.weights.values()) == ["0.bias", "0.weight", "1.bias"]


def test_equal_operations_are_one_node():
    norm = nn.LayerNorm(4).double()
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
    program = record(Of(lambda t: attention(norm(t), norm(t), norm(t))[0]), (x(1, 3, 4),))
    assert sum(name(n) == "layer_norm" for n in program.nodes) == 1


def test_scopes_are_calls_of_modules():
    shared = nn.Linear(4, 4)
    module = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared, nn.ReLU())}).double()
    module.forward = lambda t: module["b"](module["a"](t))  # pyright: ignore
    program = record(module, (x(2, 4),))
    assert [s.path for s in program.scopes] == ["a.0", "a", "b.0", "b.1", "b", ""]
    assert all(inner.first >= program.scopes[-1].first and inner.last <= program.scopes[-1].last for inner in program.scopes)


def test_the_module_is_left_as_it_was():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.log, self.count, self.norm = nn.Linear(4, 4), [1], 0, nn.BatchNorm1d(4)

        def forward(self, t: Tensor) -> Tensor:
            self.count += 1
            self.log.append(self.count)
            self.last = t
            return self.linear(t)

    module = Stateful().double().train()
    module.norm.eval()
    hooks = len(torch.nn.modules.module._global_forward_hooks), len(torch.nn.modules.module._global_forward_pre_hooks)
    log = module.log
    record(module, (x(2, 4),))
    assert (module.count, module.log, hasattr(module, "last")) == (0, [1], False)
    assert module.log is log
    assert (module.training, module.norm.training) == (True, False)
    assert hooks == (len(torch.nn.modules.module._global_forward_hooks), len(torch.nn.modules.module._global_forward_pre_hooks))


@dataclass
class Result:
    other: float
    tokens: Tensor


def test_tensors_in_what_is_returned():
    program = record(Of(lambda t: {"a": [t + 1], "b": Result(1.0, t * 2)}), (x(2, 4),))
    assert [name(n) for n in program.outputs] == ["add", "mul"]


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(2, 4, dtype=torch.float64)

    def forward(self, t: Tensor) -> Tensor:
        y = t + self.kept
        self.kept = t.detach()
        return y


FIRST = float(x(2, 4)[0, 0])
HIDDEN = {
    "numpy": Of(lambda t: t * torch.from_numpy(np.tanh(t.detach().numpy()))),
    "item": Of(lambda t: t * t.sum().item()),
    "a list": Of(lambda t: t * t.tolist()[0][0]),
    "a branch": Of(lambda t: t * 2 if abs(t[0, 0] - FIRST) < 1e-9 else t * 3),
    "random numbers": Of(lambda t: t + torch.rand_like(t)),
    "dropout": Of(lambda t: torch.nn.functional.dropout(t, 0.5, True)),
    "memory": Remembering(),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_what_a_recording_cannot_know_is_refused(what):
    with pytest.raises(BadFunctionError, match=r"^expected .*; "):
        record(HIDDEN[what], (x(2, 4),))


def test_a_weight_that_is_written_into_is_refused_and_kept():
    class Decaying(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input @ self.weight.mul_(0.5).T

    module = Decaying(4, 4).double()
    before = module.weight.detach().clone()
    with torch.no_grad(), pytest.raises(BadFunctionError, match="leaves its weights alone"):
        record(module, (x(2, 4),))
    assert torch.equal(module.weight, before)


def test_jumps_on_the_way_are_refused():
    module = nn.MultiheadAttention(4, 2, batch_first=True).double()
    program = record(Of(lambda t: t.round() + module(t, t, t)[0]), (x(1, 3, 4),))
    layers = Layers(program)
    ends = ends_of(layers, 0, "attention")
    Way.of(ends.flow, ends.enter, ends.leave)
    whole = ends_of(layers, 0, "block")
    with pytest.raises(BadFunctionError, match="round"):
        Way.of(whole.flow, whole.enter, whole.leave)


def test_half_precision_is_replayed_in_float64():
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).to(torch.bfloat16)
    program = record(module, (x(1, 3, 4).to(torch.bfloat16),))
    layers = Layers(program)
    f = Way.of(layers.flow, program.inputs, program.outputs).at(Run.recorded(program))
    (point,) = f.start
    wide = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).double()
    wide.load_state_dict(module.state_dict())
    torch.testing.assert_close(f(point)[0], wide(point).detach(), rtol=1e-13, atol=1e-13)


class Places(nn.Module):
    """Features take the places of the id 7, which have to stand first; id 0 is padding."""

    def __init__(self, *, checked: bool = True):
        super().__init__()
        self.table, self.checked = nn.Embedding(8, 4, padding_idx=0), checked

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        where = ids == 7
        if self.checked and not bool(where[0, :2].all()):
            raise ValueError("features have to stand first")
        return self.table(ids).masked_scatter(where[..., None], features)


def test_placeholder_and_special_ids_stay_where_they_are():
    ids = torch.tensor([[7, 7, 3, 1, 2, 0]])
    program = record(Places().double(), (ids, x(2, 4)))
    moved, _ = beside(program)
    assert not torch.equal(moved, ids)
    assert torch.equal(moved[:, [0, 1, 5]], ids[:, [0, 1, 5]])
    assert torch.equal(moved.sort().values, ids.sort().values)


def test_errors_of_the_module_beside_its_input_are_one_sentence():
    def first(t: Tensor) -> Tensor:
        if float(t[0, 0]) != FIRST:
            raise ValueError("another input\nand more")
        return t * 2

    with pytest.raises(BadFunctionError, match=r"^expected a function .* beside its input, got ValueError: another input; "):
        record(Of(first), (torch.full((2, 4), FIRST, dtype=torch.float64),))


def test_an_operation_that_rounds_is_named_with_its_module():
    module = nn.Sequential(nn.Linear(4, 4), Of(torch.round)).double()
    program = record(module, (x(1, 3, 4),))
    with pytest.raises(BadFunctionError, match="got round in 1, which rounds; "):
        Way.of(Layers(program).flow, program.inputs, program.outputs)
