"""The truths about small modules are themselves checked: against differences, and against runs of the modules."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from marks import sample
from problems.modules import FAMILIES, QUESTIONS, Question, constant, constants
from problems.modules.base import Formula, Function, Point, Step, asks, attend, jacobian, merge, one, plain, seeded, split
from problems.modules.behind import Behind, gate_before
from problems.modules.softmax import stack_of

ANSWERED, REFUSED = defaultdict(list), []  # the questions with an answer, by module
for question in QUESTIONS.values():
    if question.truth is None:
        REFUSED.append(question)
    else:
        ANSWERED[question.name.partition(" · ")[0]].append(question)


def points(q: Question) -> list[Point]:
    """Every truth of a question, each of a module of its own."""
    return [truth(q.build(), q.inputs()) for truth in (q.truth, *q.either) if truth is not None]


def run(module: nn.Module, inputs: Any) -> Any:
    return module(**inputs) if isinstance(inputs, dict) else module(*inputs)


class Run(TorchDispatchMode):
    """Every tensor of a run, in its order; `change` may overwrite one, given its number, as soon as it is there."""

    def __init__(self, change: Callable[[int, Tensor], None]) -> None:
        super().__init__()
        self.change = change
        self.tensors: list[Tensor] = []

    def note(self, tree: Any) -> None:
        for t in tree_leaves(tree):
            if isinstance(t, Tensor) and t.is_floating_point() and not t.is_quantized:
                self.change(len(self.tensors), t)
                self.tensors.append(t.detach().double().clone())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.note(out)
        return out


def recorded(q: Question, change: Callable[[int, Tensor], None] = lambda i, t: None) -> list[Tensor]:
    """The tensors of a fresh module's run: its inputs, its parameters, what its operations give, what it returns."""
    module, inputs = q.build(), q.inputs()
    mode = Run(change)
    mode.note(inputs)
    mode.note([p.data for p in module.parameters()])
    # a scripted module would run other operations the second time
    with torch.jit.optimized_execution(False), mode:  # pyright: ignore[reportPrivateImportUsage]
        out = run(module, inputs)
    mode.note(out)
    return mode.tensors


def streams(q: Question, t: Tensor) -> list[Tensor]:
    return list(t.split(q.parts)) if q.parts and t.ndim == 1 and t.numel() == sum(q.parts) else [t]


def places(tensors: list[Tensor], wanted: Tensor, tolerance: float) -> list[int]:
    """Where a tensor of the same entries stands, in whatever order they are: layouts differ."""
    wanted = wanted.reshape(-1).sort().values
    most = tolerance * (1 + float(wanted.abs().max()))
    found = (i for i, t in enumerate(tensors) if t.numel() == wanted.numel())
    return [i for i in found if bool((tensors[i].reshape(-1).sort().values - wanted).abs().max() <= most)]


def moved(t: Tensor) -> Tensor:
    """Every entry moved by an amount that depends on its value alone, not on where it stands."""
    return t + 1e-3 * torch.sin(37 * t)


def ordered(before: Tensor, after: Tensor) -> Tensor:
    """Entries after a move, in the order of those before it."""
    return after.reshape(-1)[before.reshape(-1).argsort()]


def assert_follows(q: Question, function: Function, point: Tensor, base: list[Tensor]) -> None:
    """A run of the module holds the point and the function's value there, and follows the function when the point moves."""
    point = point.detach()
    starts = {i for t in streams(q, point) for i in places(base, t, q.tolerance)}
    assert all(places(base, t, q.tolerance) for t in streams(q, point)), f"{q.name}: the point is no tensor of the run"

    def change(i: int, t: Tensor) -> None:
        if i in starts and bool((t.double() - base[i]).abs().max() <= q.tolerance):
            with torch.no_grad():
                t.copy_(moved(t))

    after = recorded(q, change)
    assert len(after) == len(base)
    old, new = function(point).detach(), function(moved(point)).detach()
    if q.ask.get("map") == "update":
        old, new = old + point, new + moved(point)
    for before, then in zip(streams(q, old), streams(q, new), strict=True):
        ends = places(base, before, q.tolerance)
        assert ends, f"{q.name}: the value is no tensor of the run"
        gap = ordered(base[ends[0]], after[ends[0]]) - ordered(before, then)
        assert float(gap.abs().max()) <= 10 * q.tolerance * (1 + float(then.abs().max())), f"{q.name}: the run goes elsewhere"


def assert_differentiable(q: Question, function: Function, point: Tensor) -> None:
    """The Jacobian agrees with central differences along a direction, and is finite and not zero."""
    point = point.detach()
    v = torch.randn(point.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    step = 1e-5
    differences = (function(point + step * v) - function(point - step * v)).reshape(-1).detach() / (2 * step)
    product = jacobian(function, point) @ v.reshape(-1)
    assert 0 < float(product.norm()) < float("inf"), q.name
    assert float((differences - product).norm()) <= 1e-6 * float(product.norm()), q.name


@pytest.mark.parametrize("module", sample(ANSWERED, None, *[pytest.mark.weekly] * 3))
def test_truths(module: str) -> None:
    bases: dict[Any, list[Tensor]] = {}
    for q in ANSWERED[module]:
        for function, point in points(q):
            assert_differentiable(q, function, point)
            if q.observed:
                key = (q.build, q.inputs)
                bases[key] = bases[key] if key in bases else recorded(q)
                assert_follows(q, function, point, bases[key])


@pytest.mark.parametrize("q", REFUSED, ids=lambda q: q.name)
def test_what_must_be_refused_runs(q: Question) -> None:
    run(q.build(), q.inputs())
    assert constant(q) is None


def test_flex_attention() -> None:
    """It runs under no dispatch mode, so the block's value is compared with the module's."""
    q = QUESTIONS["flex_attention · block"]
    ((function, point),) = points(q)
    for t in (point, moved(point)):
        torch.testing.assert_close(q.build()(t), function(t), rtol=1e-12, atol=1e-12)


def test_names() -> None:
    assert all(name == q.name for name, q in QUESTIONS.items())
    assert sum(map(len, FAMILIES.values())) == len(QUESTIONS) >= 150


def test_constants() -> None:
    q = QUESTIONS["LayerScale · attention 1 or scaled"]
    expected = [float(torch.linalg.svdvals(jacobian(*p))[0]) for p in points(q)]
    assert list(constants(q)) == pytest.approx(expected, rel=1e-12)
    assert constant(q) == constants(q)[0] != constants(q)[1]


def gated() -> nn.Module:
    return seeded(Behind(gate_before, g=nn.Linear(8, 8)))


def wrong(m: Any, x: Tensor) -> Formula:
    """The right function, and others: a gate fixed, values fixed, a factor, a start that is no tensor of the module's."""
    gate, v = torch.sigmoid(m.g(x)).detach(), split(m.v(x)).detach()

    def right(t: Tensor) -> Tensor:
        return m.o(plain(m, t) * torch.sigmoid(m.g(t)))

    def values_fixed(t: Tensor) -> Tensor:
        return m.o(merge(attend(split(m.q(t)), split(m.k(t)), v)) * torch.sigmoid(m.g(t)))

    maps: dict[str, Callable[[Tensor], Point]] = {
        "right": lambda t: (right, t),
        "gate": lambda t: (lambda s: m.o(plain(m, s) * gate), t),
        "values": lambda t: (values_fixed, t),
        "factor": lambda t: (lambda s: 1.001 * right(s), t),
        "start": lambda t: (lambda s: right(s / 2), 2 * t),
    }
    return Formula(x, [Step(maps=maps)])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("right", None),
        ("gate", "elsewhere"),
        ("values", "elsewhere"),
        ("factor", "value is no tensor"),
        ("start", "point is no tensor"),
    ],
)
def test_a_wrong_function_is_found(spec: str, message: str | None) -> None:
    (q,) = asks("wrong", gated, one, wrong, spec)
    ((function, point),) = points(q)
    if message is None:
        assert_follows(q, function, point, recorded(q))
        return
    with pytest.raises(AssertionError, match=message):
        assert_follows(q, function, point, recorded(q))


def test_a_wrong_layer_is_found() -> None:
    """Another layer's weights give another value."""
    q = QUESTIONS["sdpa, two blocks · block 1"]
    _, point = points(q)[0]
    (other,) = asks("wrong", q.build, one, stack_of(plain), "block 0")
    with pytest.raises(AssertionError, match="value is no tensor"):
        assert_follows(q, points(other)[0][0], point, recorded(q))


def test_a_wrong_derivative_is_found() -> None:
    q, point = QUESTIONS["sdpa · attention"], one()[0]
    with pytest.raises(AssertionError):
        assert_differentiable(q, lambda t: t.square() + t.sin().detach(), point)
    with pytest.raises(AssertionError):
        assert_differentiable(q, lambda t: t * 0, point)
