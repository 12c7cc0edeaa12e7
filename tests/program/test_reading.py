"""What is read off a program: what is refused, what is kept, and that certificates bound the values of the function itself."""

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import BadFunctionError
from howsmooth.maps.scalars import known_scalar
from howsmooth.program import Layers, ends_of, record
from howsmooth.program.reading import WholeLayer, check_agrees, read, read_function
from howsmooth.theory.around import Certified, Neighbourhood, around_graph, expand
from problems.hidden_ways import HIDING, SHAPES, Case, Looked, case, examine, least_lead, refuted

W = torch.tensor([[1.0, -1.0], [0.5, 2.0]]).double()
X = torch.tensor([[1.0, 0.2], [0.3, -0.4]]).double()

READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda t: t[0, 0].item() < 1.45,
    "bool": lambda t: bool(t[0, 0] < 1.45),
    "int": lambda t: int(t[0, 0]) < 2,
    "tolist": lambda t: t.tolist()[0][0] < 1.45,
    "tolist of data": lambda t: t.data.tolist()[0][0] < 1.45,
    "numpy": lambda t: t.detach().numpy()[0, 0] < 1.45,
    "numpy by force": lambda t: t.numpy(force=True)[0, 0] < 1.45,
    "asarray": lambda t: np.asarray(t.detach())[0, 0] < 1.45,
    "from_dlpack": lambda t: torch.from_dlpack(t.detach()).tolist()[0][0] < 1.45,
    "a pointer": lambda t: ctypes.cast(t.data_ptr(), ctypes.POINTER(ctypes.c_double))[0] < 1.45,
    "its storage": lambda t: bytes(t.detach().untyped_storage())[7] < 64,
    "pickle": lambda t: pickle.loads(pickle.dumps(t.detach()))[0, 0] < 1.45,
    "save": lambda t: (lambda b: (torch.save(t.detach(), b), b.seek(0), torch.load(b)[0, 0] < 1.45)[-1])(io.BytesIO()),
    "apply_": lambda t: t.detach().clone().apply_(lambda v: v)[0, 0] < 1.45,
    "text": lambda t: "1." in repr(t.detach()),
    "a number in text": lambda t: f"{t.detach()[0, 0].tolist():.3f}" < "1.45",
    "a subclass": lambda t: t.as_subclass(Tensor).tolist()[0][0] < 1.45,
    "a number of a subclass": lambda t: t.as_subclass(Tensor)[0, 0].item() < 9.0,
    "a parameter": lambda t: torch.nn.Parameter(t.detach())[0, 0].item() < 9.0,
    "a deep copy": lambda t: copy.deepcopy(t.detach())[0, 0].item() < 9.0,
    "the number of entries": lambda t: len((t > 1.45).nonzero()) == 0,
    "the shape behind a mask": lambda t: t[t > 1.45].numel() == 0,
    "masked_select": lambda t: t.masked_select(t > 1.45).numel() == 0,
    "repeats": lambda t: len(torch.repeat_interleave((t > 1.45).flatten().long())) == 0,
    "equality": lambda t: torch.equal(t.clamp(max=1.45), t),
    "a tensor made before": lambda t: torch.zeros(2, 2).double().copy_(t.detach()).tolist()[0][0] < 1.45,
    "an output given": lambda t: torch.mul(t.detach(), 1, out=torch.zeros(2, 2).double()).tolist()[0][0] < 1.45,
    "a part of a layer norm": lambda t: torch.native_layer_norm(t, (2,), None, None, 1e-5)[1].tolist()[0][0] > 0,
    "an error": lambda t: _raises(lambda: torch.linalg.cholesky(torch.eye(2) * (1.45 - t[0, 0]))),
    "what it catches itself": lambda t: not _raises(lambda: 1 / (t.tolist()[0][0] < 1.45)),
}


def _raises(f: Callable[[], object]) -> bool:
    try:
        f()
    except Exception:
        return True
    return False


@pytest.mark.parametrize("name", READS)
def test_a_function_that_reads_its_input_is_refused(name: str):
    """Each flips the answer where the first entry passes 1.45, which derivatives and points nearby do not show."""
    with pytest.raises(BadFunctionError):
        hs.certified_radius(lambda t: (t @ W).mean(0) * (1 if READS[name](t) else -1), X, attack=False)


JUMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "sign": torch.sign,
    "fmod": lambda t: torch.fmod(t, 0.5),
    "remainder": lambda t: t % 0.5,
    "division by floor": lambda t: torch.div(t, 0.5, rounding_mode="floor"),
    "division by trunc": lambda t: torch.div(t, 0.5, rounding_mode="trunc"),
    "division in place": lambda t: t.clone().div_(0.5, rounding_mode="floor"),
    "floor division": lambda t: t // 0.5,
    "half": lambda t: t.half().double(),
    "bfloat16": lambda t: t.bfloat16().double(),
    "int": lambda t: (8 * t).int().double(),
    "int8": lambda t: (8 * t).to(torch.int8).double(),
    "a comparison": lambda t: (t > 0.5).double(),
    "a sum of integers": lambda t: t.sum(-1, keepdim=True, dtype=torch.int64).double(),
    "a mean in half": lambda t: t.mean(-1, keepdim=True, dtype=torch.float16).double(),
    "a half in place": lambda t: t.clone().copy_(t.half()),
    "bits": lambda t: t.view(torch.float32).double()[:, :2],
    "argmax": lambda t: torch.nn.functional.one_hot(t.argmax(-1), 2).double(),
    "bucketize": lambda t: torch.bucketize(t, torch.tensor([0.0, 0.5]).double()).double(),
    "fake quantization": lambda t: torch.fake_quantize_per_tensor_affine(t.float(), 0.1, 0, -128, 127).double(),
    "where": lambda t: torch.where(t > 0.5, t, -t),
    "masked_fill": lambda t: t.masked_fill(t > 0.5, 0.0),
    "index": lambda t: t[:, t.argmax(0)],
    "gather": lambda t: t.gather(1, t.argsort(1)),
    "nan_to_num": lambda t: torch.nan_to_num(t, posinf=1.0),
    "copysign": lambda t: torch.copysign(torch.ones_like(t), t),
    "heaviside": lambda t: torch.heaviside(t, torch.zeros_like(t)),
    "strides": lambda t: t.T.as_strided((2, 2), (2, 1)),
    "a layer norm's weight": lambda t: torch.nn.functional.layer_norm(X, (2,), t[0], None),
}


@pytest.mark.parametrize("name", JUMPS)
def test_what_jumps_or_has_no_bound_is_refused(name: str):
    with pytest.raises(BadFunctionError):
        hs.certified_radius(lambda t: JUMPS[name](t).mean(0) + 0.01 * (t @ W).mean(0), X, attack=False)


def test_what_jumps_on_constants_alone_is_kept():
    steps = torch.div(torch.arange(4).reshape(2, 2), 2, rounding_mode="floor").double()
    plain = hs.certified_radius(lambda t: (t @ W + steps).mean(0), X, attack=False)
    noted = hs.certified_radius(
        lambda t: (t @ W + torch.div(torch.arange(4).reshape(2, 2), 2, rounding_mode="floor")).mean(0), X, attack=False
    )
    assert noted.certified == plain.certified > 0


@pytest.mark.parametrize("hiding", HIDING)
def test_values_are_bounded_whatever_autograd_is_told(hiding: str):
    looked = Looked()
    for seed, shape in enumerate(list(SHAPES)[:3]):
        examine(case(seed, shape, hiding), looked)
    assert looked.certified == looked.slopes == 3
    assert looked.wrong == []


@pytest.mark.slow
@pytest.mark.weekly
def test_values_are_bounded_on_many():
    looked = Looked()
    for seed in range(40):
        examine(case(seed), looked)
    assert looked.certified == 40
    assert looked.wrong == []


def test_checker_fails_on_a_wrong_radius():
    c = case(0, "a gate", "detach")
    radius = hs.certified_radius(c.f, c.x, per=c.per)
    assert refuted(c, radius) == []
    assert refuted(c, replace(radius, certified=1.1 * radius.attacked))
    assert refuted(c, replace(radius, point=c.x))


def test_a_gate_that_is_cut_off():
    """Another answer leads by 0.16 within 0.675, which is what follows where the gate is thought to stay."""
    gate = hs.certified_radius(lambda t: ((t @ W) * torch.sigmoid(4 * (t @ W)).detach()).mean(0), X)
    plain = hs.certified_radius(lambda t: ((t @ W) * torch.sigmoid(4 * (t @ W))).mean(0), X)
    c = Case(lambda t: t, lambda t: ((t @ W) * torch.sigmoid(4 * (t @ W))).mean(0), X, "token", ())
    assert least_lead(c.plain, X, 1, 0.675, "token") < -0.1
    assert 0.2 < gate.certified < 0.5 * 0.675
    assert gate.certified == pytest.approx(plain.certified)
    assert gate.attacked == pytest.approx(plain.attacked)
    assert gate.first_order == pytest.approx(plain.first_order)


@pytest.mark.parametrize("change", [0.1, 1.0])
def test_a_change_of_what_is_cut_off(change: float):
    hidden, plain = (hs.certified_radius(f, X, change=change) for f in (lambda t: (t @ W).detach(), lambda t: t @ W))
    assert hidden.certified == pytest.approx(plain.certified)
    assert hidden.attacked == pytest.approx(plain.attacked)


class _Block(torch.nn.Module):
    """Attention, and a gate that gradients do not go through."""

    def __init__(self, hide: bool):
        super().__init__()
        torch.manual_seed(0)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.hide = torch.nn.Linear(8, 8), hide

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * self.attention(x, x, x, need_weights=False)[0]
        z = self.up(x)
        gate = torch.sigmoid(4 * z)
        return x + 3 * z * (gate.detach() if self.hide else gate)


@pytest.mark.parametrize("within", [1e-3, 0.3])
def test_the_slope_of_a_block_counts_what_is_cut_off(within: float):
    x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(1))
    found = hs.load(_Block(True).eval()).measure(inputs=x, layer=0, map="block", within=within, steps=2)
    plain = _Block(False).double().eval()
    random, start = torch.Generator().manual_seed(2), x.double()
    for share in (0.0, 1.0):
        step = torch.randn(1, 3, 8, generator=random).double()
        J = torch.autograd.functional.jacobian(plain, start + share * within * step / step.norm(dim=-1, keepdim=True))
        assert float(torch.linalg.matrix_norm(J.reshape(24, 24), 2)) <= found.upper  # pyright: ignore[reportAttributeAccessIssue]
    assert found.estimate.point is not None
    J = torch.autograd.functional.jacobian(plain, found.estimate.point[None])
    norm = float(torch.linalg.matrix_norm(J.reshape(24, 24), 2))  # pyright: ignore[reportAttributeAccessIssue]
    assert found.lower == pytest.approx(norm, rel=1e-5)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax of columns": lambda t: torch.softmax(t @ W, 0),
    "softmax of an axis counted from the front": lambda t: torch.softmax(t @ W, 1),
    "softmax in float32": lambda t: torch.softmax(t @ W, -1, dtype=torch.float32),
    "addmm": lambda t: torch.addmm(X, t, W, alpha=3.0).tanh(),
    "addmm of both": lambda t: torch.addmm(X, t, t.T, beta=2.0, alpha=3.0),
    "baddbmm of both": lambda t: torch.baddbmm(X[None], t[None], t.T[None], beta=0.5, alpha=-2.0)[0],
    "a difference with a factor": lambda t: torch.sub(t, t @ W, alpha=2.5).sigmoid(),
    "a product with one row": lambda t: t * t[0],
    "a product with a row of ones width": lambda t: (t[:, :1] * t[0, :1]).expand(-1, 2) + t,
    "a copy in place": lambda t: t.clone().copy_(t.tanh()) + t,
    "a tensor of it": lambda t: torch.tensor(t.detach()) @ W,
    "float32 on the way": lambda t: (t.float() @ W.float()).tanh().double() + t,
    "vmap": lambda t: torch.vmap(lambda r: torch.tanh(r) * 2)(t),
    "relu with two kinks": lambda t: torch.relu(t) + 5 * torch.relu(t - 20),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("r", [1e-4, 0.1, 40.0])
def test_operations_stay_within_their_expansion(name: str, r: float):
    f = OPERATIONS[name]
    room = 1e-5 if "float32" in name else 1e-12
    for together in (True, False):
        expanded = expand(read_function(f, X), X, together)
        moved = expanded.at(Neighbourhood.of(X, r, "sequence" if together else "token"))
        random = torch.Generator().manual_seed(0)
        for _ in range(100):
            step = torch.randn(2, 2, generator=random).double()
            step = r * step / (step.norm() if together else step.norm(dim=-1, keepdim=True))
            change = (f(X + step) - f(X)).double()
            size = room * (1 + float(f(X + step).abs().max()))
            assert bool(((change - moved.shift).abs() <= moved.spread * (1 + 1e-9) + size).all())
            assert float(change.norm()) <= moved.total * (1 + 1e-9) + size


def test_at_small_radii_an_expansion_is_tight():
    """A wrong derivative would be too long or too short."""
    for name in ("softmax of columns", "softmax of an axis counted from the front", "addmm of both", "a product with one row"):
        f, r = OPERATIONS[name], 1e-7
        moved = expand(read_function(f, X), X, True).at(Neighbourhood.of(X, r, "sequence"))
        J = torch.autograd.functional.jacobian(f, X).reshape(4, 4)  # pyright: ignore[reportAttributeAccessIssue]
        assert moved.total == pytest.approx(r * float(torch.linalg.matrix_norm(J, 2)), rel=1e-4)


def test_a_derivative_through_detach_is_that_of_the_values():
    f = read_function(lambda t: (t @ W).detach() * torch.tanh(t).data, X)
    J = torch.autograd.functional.jacobian(f, X)
    truth = torch.autograd.functional.jacobian(lambda t: (t @ W) * torch.tanh(t), X)
    assert torch.allclose(J, truth)  # pyright: ignore[reportArgumentType]
    slope = around_graph(Certified(f, X), Neighbourhood.of(X, 1e-9)).slope
    assert slope >= float(torch.linalg.matrix_norm(truth.reshape(4, 4), 2))  # pyright: ignore[reportAttributeAccessIssue]


def test_what_has_kinks_or_bends_far_out_is_not_known_by_its_values():
    assert known_scalar(lambda t: torch.tanh(t) + torch.exp(t - 60)) is None
    nodes = read_function(lambda t: torch.relu(t) + 5 * torch.relu(t - 20), X).nodes
    assert sum(node.name == "relu" and node.scalar is not None for node in nodes) == 2
    with pytest.raises(BadFunctionError, match="got clamp"):
        read_function(lambda t: t * torch.rsqrt(t.square().mean(-1, keepdim=True).clamp(max=1e6) + 1e-5), X)


def test_a_graph_is_compared_where_it_is_used():
    state = {"calls": 0}

    def other_later(t: Tensor) -> Tensor:
        state["calls"] += 1
        return t * (1.0 if state["calls"] == 1 else 1.1)

    with pytest.raises(BadFunctionError, match="they miss at its input"):
        read_function(other_later, X)
    with pytest.raises(BadFunctionError, match="miss by"):
        read_function(lambda t: t * 1.0, X * 0, truth=lambda t: t * 2.0)  # at zero both agree
    graph = read_function(torch.tanh, X)
    check_agrees(graph, torch.tanh, [X, X + 100])
    with pytest.raises(BadFunctionError, match="miss by"):
        check_agrees(graph, lambda t: torch.where(t > 50, 2.0, torch.tanh(t)), [X, X + 100])


def test_what_is_kept_for_the_next_call_is_refused():
    kept: list[Tensor] = []

    def f(t: Tensor) -> Tensor:
        kept.append(t @ W)
        return kept[0]

    with pytest.raises(BadFunctionError, match=r"depends on x|they miss"):
        read_function(f, X)


def test_a_layer_inside_a_function_is_what_it_computes():
    layer = hs.Attention(W, W.T, torch.eye(2).double(), W)
    taken = hs.certified_radius(lambda t: layer(t).mean(0), X)
    plain = hs.certified_radius(lambda t: (torch.softmax(layer.scale * (t @ W.T) @ (t @ W).T, -1) @ t @ W.T).mean(0), X)
    assert taken.certified == pytest.approx(plain.certified, rel=0.1)
    assert taken.attacked == pytest.approx(plain.attacked, rel=1e-6)
    assert taken.certified <= taken.attacked


@pytest.mark.parametrize("limit", [1.0, 100.0])
def test_memory_that_is_written_to_by_way_of_a_view(limit: float):
    def through_a_view(t: Tensor) -> Tensor:
        z = t * 2
        z.view(-1).add_(z.new_zeros(1) + limit)
        return z

    def through_the_whole(t: Tensor) -> Tensor:
        z = t * 2
        first = z[0]
        z.mul_(limit)
        return z + first

    for f in (through_a_view, through_the_whole, lambda t: (t * 2).view(-1).mul_(limit).reshape(2, 2)):
        pieces = read_function(f, X)
        assert torch.allclose(pieces(X + 1), f(X + 1))


class _Layer(torch.nn.Module):
    """Attention as people write it, inside a block; `reads` in the block, where a number is read off."""

    def __init__(self, reads: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o, self.up, self.down = (torch.nn.Linear(8, 8).double() for _ in range(6))
        self.norm, self.reads = torch.nn.LayerNorm(8).double(), reads

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        return x + self.down(torch.nn.functional.gelu(self.up(x))) * (2.0 if self.reads and x[0, 0, 0] > 50 else 1.0)


class _Model(torch.nn.Module):
    def __init__(self, reads: bool = False):
        super().__init__()
        self.layers = torch.nn.ModuleList([_Layer(reads), _Layer()])
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


TOKENS = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(3)).double()


def _whole(block: _Layer) -> hs.Attention:
    w = {f"w_{k}": getattr(block, k).weight.detach() for k in "qkvo"}
    return hs.Attention(**w, **{f"b_{k}": getattr(block, k).bias.detach() for k in "qkvo"}, heads=2)


@pytest.mark.slow
@pytest.mark.parametrize("to", [None, 1])
def test_the_segment_of_a_model(to: int | None):
    """Bounds of a block, and of both, hold at every point and are sharp at small radii, attention taken whole or not."""
    model = _Model()
    program = record(model, (TOKENS,))
    layers = Layers(program)
    ends = ends_of(layers, 0, "block", to=to)
    wholes = []
    for k, block in enumerate(model.layers):
        own = ends_of(layers, k, "attention")
        assert isinstance(block, _Layer)
        wholes.append(WholeLayer(own.enter[0], own.leave[0], _whole(block)))
    pieces, plain = read(program, ends, wholes), read(program, ends)
    assert [p.name for p in pieces.nodes].count("layer") == (1 if to is None else 2)
    x, f = TOKENS[0], model.layers[0] if to is None else model

    def jacobian(y: Tensor) -> Tensor:
        return torch.autograd.functional.jacobian(lambda t: f(t[None])[0], y).reshape(24, 24)  # pyright: ignore

    assert torch.allclose(pieces(x), f(TOKENS)[0])
    assert torch.allclose(plain(x), f(TOKENS)[0])
    for r in (1e-7, 0.05):
        around = around_graph(Certified(pieces, x), Neighbourhood.of(x, r))
        moved = expand(plain, x, False).at(Neighbourhood.of(x, r))
        for seed in range(5):
            step = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)).double()
            y = x + r * step / step.norm(dim=-1, keepdim=True)
            change = float((f(y[None])[0] - f(TOKENS)[0]).norm())
            assert change <= around.moved_total * (1 + 1e-9)
            assert change <= moved.total * (1 + 1e-9)
            assert float(torch.linalg.matrix_norm(jacobian(y), 2)) <= around.slope
    norm = float(torch.linalg.matrix_norm(jacobian(x), 2))
    assert around_graph(Certified(pieces, x), Neighbourhood.of(x, 1e-9)).slope == pytest.approx(norm, rel=1e-3)


def test_a_wrong_layer_is_refused():
    model = _Model()
    program = record(model, (TOKENS,))
    layers = Layers(program)
    block, own = model.layers[0], ends_of(layers, 0, "attention")
    assert isinstance(block, _Layer)
    wrong = replace(_whole(block), b_v=None)
    with pytest.raises(BadFunctionError, match="miss by"):
        read(program, ends_of(layers, 0, "block"), [WholeLayer(own.enter[0], own.leave[0], wrong)])


def test_a_block_that_reads_is_refused_and_its_neighbour_is_not():
    program = record(_Model(reads=True), (TOKENS,))
    layers = Layers(program)
    with pytest.raises(BadFunctionError, match="reads a number off"):
        read(program, ends_of(layers, 0, "block"))
    read(program, ends_of(layers, 1, "block"))


def test_a_block_without_its_residual_path():
    model = _Model()
    program = record(model, (TOKENS,))
    layers = Layers(program)
    pieces = read(program, ends_of(layers, 0, "update"))
    assert torch.allclose(pieces(TOKENS[0]), (model.layers[0](TOKENS) - TOKENS)[0])


@torch.library.custom_op("howsmooth_tests::first_entry", mutates_args=())
def first_entry(t: Tensor) -> float:
    return float(t[0, 0])


def test_a_number_that_an_operator_of_ones_own_returns_is_read_off():
    """The answer flips in a strip that no point of the comparison lies in."""
    with pytest.raises(BadFunctionError, match="reads a number off"):
        hs.certified_radius(lambda t: (t @ W).mean(0) * (-1 if abs(first_entry(t) - 1.3) < 0.02 else 1), X, attack=False)


def test_memory_from_outside_that_is_written_to_is_refused():
    """Whoever holds it can read it unseen."""
    shared = torch.zeros(2, 2).double()
    seen = shared.numpy()

    def f(t: Tensor) -> Tensor:
        shared.copy_(t.detach())
        return (t @ W).mean(0) * (-1 if abs(seen[0, 0] - 1.3) < 0.02 else 1)

    with pytest.raises(BadFunctionError):
        hs.certified_radius(f, X, attack=False)
