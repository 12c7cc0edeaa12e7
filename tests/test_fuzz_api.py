"""The public names under hostile arguments: no exception but ours, in one sentence, and no wrong number."""

import copy
import functools
import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian as dense_jacobian

import howsmooth as hs
from howsmooth.errors import HowSmoothError
from howsmooth.maps import Jacobian
from howsmooth.measures import Distance
from howsmooth.search import Radius, WorstCase
from howsmooth.spectral import Estimates
from howsmooth.study.jobs import EstimateRow
from howsmooth.theory import Bounds, Splitting
from howsmooth.training import Clipped
from marks import first
from problems import hostile, readers
from problems.hostile import tokens

CALLS, PARTS = 2000, 10
# names of models have tests of their own, and what a density raises is its own to say
OWN: dict[str, type] = {"source": str, "model": str, "density": nn.Module}
EYE = torch.eye(4)
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A public call: what it takes, by name, and what is checked of its answer. share: of all calls."""

    function: Callable[..., Any]
    good: dict[str, Callable[[], Any]]
    check: Callable[[Any, Arguments], None]
    share: float = 1.0


@functools.cache
def reads() -> hs.Model:
    return hs.load(readers.bert())


@functools.cache
def captured() -> hs.Capture:
    return reads().capture(ids=[5, 6, 7, 8])


def layer(**changes: Any) -> hs.Attention:
    weights: Arguments = {"w_q": EYE, "w_k": EYE, "w_v": EYE, "w_o": EYE}
    return hs.Attention(**(weights | changes))


def constant(f: Callable[[Tensor], Tensor], x: Tensor) -> float | None:
    """The dense float64 value; nothing where float64 itself overflows on the way."""
    x = x.detach().double()
    matrix = dense_jacobian(f, x)
    assert isinstance(matrix, Tensor)
    matrix = matrix.reshape(-1, x.numel())
    return float(torch.linalg.matrix_norm(matrix, ord=2)) if bool(matrix.isfinite().all()) else None


def room(f: Any, x: Tensor) -> float:
    """What rounding of the logits makes of a constant: one unit in a logit s moves weights by s units."""
    largest = 0.0
    if isinstance(f, hs.Attention):
        q, k = (x.double().norm(dim=-1).max() * w.double().norm() for w in (f.w_q, EYE if f.w_k is None else f.w_k))
        largest = abs(f.scale) * float(q * k)
    return 1e-9 + 4 * torch.finfo(torch.float64).eps * largest


def holds(estimate: hs.Estimate, truth: float | None, room: float = 1e-9) -> None:
    assert 0 <= estimate.lower < math.inf
    assert estimate.lower <= estimate.upper, "an interval the wrong way round"
    if truth is not None:
        assert estimate.lower <= truth * (1 + room), f"lower {estimate.lower} above {truth}"
        assert estimate.upper >= truth * (1 - room), f"upper {estimate.upper} below {truth}"


def in_double(f: Any) -> Callable[[Tensor], Tensor]:
    if isinstance(f, nn.Module):
        return copy.deepcopy(f).double()
    return f.to(torch.float64) if isinstance(f, hs.Map) else f


def measured(estimate: hs.Estimate, given: Arguments) -> None:
    """Against the dense value, where the input is tokens."""
    f, x = given["f"], given["x"]
    if isinstance(x, Tensor) and isinstance(f, hs.Map):
        holds(estimate, constant(in_double(f), x), room(f, x))
    else:
        holds(estimate, None)


def measured_batch(estimates: Estimates, given: Arguments) -> None:
    for estimate, x in zip(estimates, given["xs"], strict=True):
        holds(estimate, constant(in_double(given["f"]), x), room(given["f"], x))


def works(f: hs.Map, _: Arguments) -> None:
    """A map that was let in has a constant, the right one, at tokens that fit it."""
    x = torch.linspace(-1, 1, 3 * f.width).reshape(3, f.width)
    try:
        estimate = hs.lipschitz(f, x)
    except HowSmoothError as error:
        one_sentence(error)
    else:
        holds(estimate, constant(in_double(f), x), room(f, x))


def bounded(bounds: Bounds, given: Arguments) -> None:
    assert not any(row.log_value is not None and math.isnan(row.log_value) for row in bounds)
    x = given.get("x")
    if isinstance(x, Tensor) and (truth := constant(in_double(given["attn"]), x)) is not None:
        error = room(given["attn"], x)
        for row in bounds:
            if row.value is not None:
                assert row.value >= truth * (1 - error) if row.side == "upper" else row.value <= truth * (1 + error)


def a_spectrum(found: hs.Spectrum, _: Arguments) -> None:
    assert bool((found.lower <= found.values).all())
    assert bool((found.values <= found.upper).all())
    holds(found.estimate, constant(layer(), tokens()))


def a_gain(gain: hs.Gain, _: Arguments) -> None:
    assert gain.lower is not None
    assert gain.upper is not None
    assert 0 <= gain.lower <= gain.value <= gain.upper < math.inf


def product(J: Jacobian, given: Arguments) -> None:
    answer = J @ given["v"] if "v" in given else J.dense()
    assert bool(answer.isfinite().all()) or not bool(given["x"].isfinite().all())


def finite(answer: Tensor, _: Arguments) -> None:
    assert not bool(answer.isnan().any())


def a_distance(d: Distance, _: Arguments) -> None:
    assert 0 <= d.lower <= d.upper


def a_measure(mu: hs.Measure, _: Arguments) -> None:
    assert float(mu.mass.sum()) == pytest.approx(1.0, abs=1e-6)
    assert bool(mu.points.isfinite().all())


def a_worst(w: WorstCase, given: Arguments) -> None:
    holds(w.estimate, None)
    assert w.ratio is None or w.ratio <= 1 + 1e-6


def scores() -> nn.Module:
    """A score for each of three answers."""
    head = nn.Linear(4, 3)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 2, 12).reshape(3, 4).cos())
        head.bias.zero_()
    return nn.Sequential(head, nn.Tanh())


def a_radius(radius: Radius, given: Arguments) -> None:
    """No point within the certified radius has another answer, or an output further away."""
    assert 0 <= radius.certified <= radius.attacked
    assert not math.isnan(radius.first_order)
    f, x = given["model"], given.get("x")
    if not isinstance(x, Tensor) or not isinstance(f, nn.Module | hs.Map) or radius.certified == 0:
        return
    f, x = in_double(f), x.detach().double()
    step = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step = radius.certified * step / (step.norm(dim=-1, keepdim=True) if radius.per == "token" else step.norm())
    free = given.get("tokens")
    if free is not None:
        held = [i for i in range(x.shape[-2]) if i not in free and i - x.shape[-2] not in free]
        step[..., held, :] = 0.0
    with torch.no_grad():
        y, there = f(x), f(x + step)
    if radius.label is None:
        assert float((there - y).norm()) <= radius.margin * (1 + 1e-9)
    else:
        assert int(there.reshape(-1, there.shape[-1])[-1].argmax()) == radius.label


def a_splitting(s: Splitting, _: Arguments) -> None:
    assert s.moved.lower <= s.moved.upper
    assert s.split.lower <= s.split.upper


def constants(answer: Any, _: Arguments) -> None:
    for m in answer if isinstance(answer, tuple) else (answer,):
        holds(m.estimate, None)


def grown(answer: Any, _: Arguments) -> None:
    assert answer.rows
    ends = [(row.lower, row.upper) for row in answer.rows if isinstance(row, EstimateRow)]  # a picture has no interval
    assert all(low is not None and up is not None and 0 <= low <= up for low, up in ends)


def anything(answer: Any, _: Arguments) -> None:
    repr(answer)


def optional(**values: Any) -> dict[str, Callable[[], Any]]:
    return {name: lambda value=value: value for name, value in values.items()}


def matvec(f: Any, x: Any, v: Any) -> Any:
    return hs.jacobian(f, x) @ v


def method(of: Callable[[], Any], name: str) -> Callable[..., Any]:
    return lambda **given: getattr(of(), name)(**given)


def trains() -> nn.Module:
    """A fresh one, since its weights may be written to."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def own_layer() -> hs.Attention:
    return layer(**{name: EYE.clone() for name in ("w_q", "w_k", "w_v", "w_o")})


def probe() -> Tensor:
    return tokens()[None]


def logged(values: dict[str, float], _: Arguments) -> None:
    assert values["smoothness/layer_00"] >= 0


def penalised(term: Tensor, given: Arguments) -> None:
    assert term.ndim == 0
    assert float(term.detach()) >= 0


def clipped(answer: Clipped, given: Arguments) -> None:
    assert all(row.after <= answer.target * (1 + 1e-6) for row in answer.changed)


def attended(out: Tensor, given: Arguments) -> None:
    assert out.shape[-2] == given["query"].shape[-2]


def in_context(**given: Any) -> str:
    with hs.use_sdpa(**given):
        return "inside"


MODEL = {"ids": lambda: [5, 6, 7, 8], "layer": lambda: 0}
STUDY = {"model": reads, "text": lambda: readers.ids(20), "lengths": lambda: [4], "samples": lambda: 1, "layers": lambda: [0]}
WEIGHTS = {name: lambda: EYE for name in ("w_q", "w_k", "w_v", "w_o")}
CHOICES = optional(heads=1, kv_heads=None, b_q=None, b_o=None, scale=0.5, softcap=None, causal=False, window=None, bias=None)
CHOICES |= optional(attention_mask=None, q_norm=None, k_norm=None, rotary=None)

CALLS_OF: dict[str, Call] = {
    "Attention": Call(hs.Attention, WEIGHTS | CHOICES, works, 3.0),
    "Attention.from_matrices": Call(
        hs.Attention.from_matrices, {"A": lambda: EYE, "V": lambda: EYE} | optional(causal=False, window=None), works
    ),
    "Attention.from_module": Call(
        hs.Attention.from_module, {"module": lambda: nn.MultiheadAttention(4, 2)} | optional(causal=True), works, 0.5
    ),
    "Attention.head": Call(lambda index: layer(heads=2).head(index), {"index": lambda: 1}, works, 0.5),
    "Attention.__call__": Call(lambda x: layer()(x), {"x": tokens}, anything),
    "Attention.to": Call(lambda device, dtype: layer().to(device, dtype), optional(device=None, dtype=None), works, 0.5),
    "Map.__matmul__": Call(lambda inner: layer() @ inner, {"inner": lambda: hs.LayerNorm(torch.ones(4))}, works, 0.5),
    "LayerNorm": Call(hs.LayerNorm, {"weight": lambda: torch.ones(4)} | optional(bias=None, eps=1e-5), works),
    "RMSNorm": Call(hs.RMSNorm, {"weight": lambda: torch.ones(4)} | optional(bias=None, eps=1e-5), works),
    "Rotary": Call(hs.Rotary, {"cos": tokens, "sin": tokens} | optional(interleaved=False), anything),
    "Rotary.from_base": Call(
        hs.Rotary.from_base, optional(width=4, positions=3, base=1e4, interleaved=True, dtype=torch.float32), anything
    ),
    "Measure": Call(hs.Measure, {"points": tokens} | optional(weights=None, positions=None), a_measure),
    "Measure.from_tokens": Call(hs.Measure.from_tokens, {"tokens": tokens} | optional(causal=True), a_measure),
    "Measure.from_density": Call(
        hs.Measure.from_density,
        {"density": lambda: lambda x: x.square().sum(-1), "axes": lambda: [torch.linspace(0, 1, 4)]},
        a_measure,
    ),
    "Measure.split": Call(lambda **given: hs.Measure(tokens()).split(**given), optional(atom=0, parts=2), a_measure),
    "Measure.merge": Call(lambda tol: hs.Measure(tokens()).merge(tol), {"tol": lambda: 0.1}, a_measure),
    "Measure.moved": Call(lambda points: hs.Measure(tokens()).moved(points), {"points": tokens}, a_measure),
    "Measure.to": Call(lambda **given: hs.Measure(tokens()).to(**given), optional(device=None, dtype=None), a_measure, 0.5),
    "Gaussian": Call(hs.Gaussian, {"mean": lambda: torch.ones(4), "cov": lambda: EYE}, anything),
    "Gaussian.sample": Call(
        lambda **given: hs.Gaussian(torch.ones(4), EYE).sample(**given), optional(n=3, seed=0), finite, 0.5
    ),
    "wasserstein": Call(
        hs.wasserstein,
        {"mu": lambda: hs.Measure(tokens()), "nu": lambda: hs.Measure(tokens() ** 2)} | optional(p=2.0, method="auto"),
        a_distance,
    ),
    "Ball": Call(hs.Ball, {"radius": lambda: 1.0}, anything, 0.5),
    "BallAround": Call(hs.BallAround, {"x": tokens, "radius": lambda: 1.0}, anything, 0.5),
    "Ellipsoid": Call(hs.Ellipsoid, {"norm": lambda: hs.RMSNorm(torch.ones(4))}, anything, 0.5),
    "lipschitz": Call(hs.lipschitz, {"f": layer, "x": tokens}, measured, 3.0),
    "lipschitz by settings": Call(
        lambda **settings: hs.lipschitz(layer(), tokens(), **settings),
        optional(tol=1e-3, certify=None, seed=0, solver=None),
        lambda estimate, _: holds(estimate, constant(layer(), tokens())),
        2.0,
    ),
    "lipschitz by k": Call(
        lambda **settings: hs.lipschitz(layer(), tokens(), **settings),
        {"k": lambda: 3} | optional(certify=None, seed=0),
        a_spectrum,
    ),
    "GolubKahan": Call(hs.GolubKahan, optional(max_steps=300, delta=1e-6, rigorous=False), anything),
    "lipschitz of a function": Call(
        lambda x: hs.lipschitz(torch.tanh, x),
        {"x": tokens},
        lambda estimate, given: holds(estimate, constant(torch.tanh, given["x"])),
    ),
    "lipschitz of a module": Call(
        lambda x: hs.lipschitz(nn.Linear(4, 4), x), {"x": tokens}, lambda estimate, _: holds(estimate, None)
    ),
    "lipschitz_batch": Call(hs.lipschitz_batch, {"f": layer, "xs": lambda: tokens()[None]}, measured_batch, 2.0),
    "gain": Call(hs.gain, {"f": layer, "x": tokens} | optional(probes=2, confidence=0.9, tokens=[0], seed=0), a_gain),
    "jacobian": Call(hs.jacobian, {"f": layer, "x": tokens}, product),
    "jacobian @": Call(matvec, {"f": layer, "x": tokens, "v": tokens}, anything),
    "bounds at a point": Call(hs.bounds, {"attn": layer, "x": tokens}, bounded, 2.0),
    "bounds over a ball": Call(hs.bounds, {"attn": layer} | optional(n=3, radius=1.0), bounded, 2.0),
    "splitting": Call(hs.splitting, {"f": layer, "x": tokens}, a_splitting, 2.0),
    "worst_case": Call(
        hs.worst_case, {"f": layer} | optional(n=2, radius=1.0, over=None, steps=1, restarts=2, seed=0), a_worst
    ),
    "certified_radius": Call(
        hs.certified_radius,
        {"model": scores, "x": tokens} | optional(label=None, per="token", tokens=[0, 2], attack=True),
        a_radius,
    ),
    "certified_radius of a change": Call(
        hs.certified_radius, {"model": layer, "x": tokens} | optional(change=0.1, per="sequence", tokens=None), a_radius
    ),
    "certified_radius of a model": Call(
        hs.certified_radius,
        {"model": reads, "ids": lambda: [5, 6, 7, 8]} | optional(layer=0, map="attention", change=0.1, attack=False),
        a_radius,
        0.25,
    ),
    "worst_case around": Call(
        lambda f, over, steps: hs.worst_case(f, over=over, steps=steps, restarts=2),
        {"f": lambda: nn.Linear(4, 4), "over": lambda: hs.BallAround(tokens(), 0.1), "steps": lambda: 1},
        a_worst,
    ),
    "load": Call(hs.load, {"source": readers.bert} | optional(device=None, dtype=None, side=None, tokenizer=None), anything),
    "Model.measure": Call(method(reads, "measure"), MODEL | optional(map="attention", head=None, heads=False), constants, 2.0),
    "Model.measure masked": Call(method(reads, "measure"), MODEL | {"mask": lambda: [1, 1, 1, 0]}, constants),
    "Model.measure inputs": Call(
        method(reads, "measure"), {"layer": lambda: [1], "input_ids": lambda: torch.tensor([[5, 6, 7]])}, constants
    ),
    "Model.capture": Call(method(reads, "capture"), {"windows": lambda: [[5, 6], [7, 8, 9]]}, anything),
    "Model.capture text": Call(method(reads, "capture"), {"text": lambda: "a text", "n": lambda: 4}, anything, 0.5),
    "Model.capture inputs": Call(
        method(reads, "capture"), {"inputs": lambda: {"input_ids": torch.ones(1, 3).long()}}, anything
    ),
    "Model.to": Call(lambda device: reads().to(device), {"device": lambda: "cpu"}, anything, 0.5),
    "Model.text": Call(lambda text: reads().text(text), {"text": lambda: "a text"}, anything, 0.25),
    "Capture.measure": Call(
        method(captured, "measure"),
        {"layer": lambda: 0} | optional(map="attention", head=None, heads=False, factor=1.0, closed=None),
        constants,
        2.0,
    ),
    "Capture.heads": Call(lambda layer: captured().heads(layer), {"layer": lambda: 1}, anything, 0.5),
    "Capture.tokens": Call(lambda layer, map: captured().tokens(layer, map), optional(layer=1, map="attention"), finite, 0.5),
    "Capture.attention": Call(lambda layer: captured().attention(layer), {"layer": lambda: 1}, works, 0.5),
    "Tracker": Call(
        lambda **given: hs.Tracker(**given).update(),
        {"model": trains, "probe": probe}
        | optional(layers="all", map="attention", heads=False, check_every=0, tol=1e-2, certify=None, average=False),
        logged,
    ),
    "Tracker.update": Call(
        lambda step: hs.Tracker(trains(), probe(), check_every=0).update(step), optional(step=None), logged, 0.5
    ),
    "WarmStart": Call(hs.WarmStart, optional(products=1, v=None), anything, 0.5),
    "smoothness": Call(hs.smoothness, {"f": layer, "x": tokens, "state": hs.WarmStart} | optional(batched=False), finite),
    "smoothness of a function": Call(
        lambda x, batched: hs.smoothness(torch.tanh, x, batched=batched), {"x": tokens} | optional(batched=True), finite
    ),
    "SmoothnessPenalty": Call(
        lambda batch, **given: hs.SmoothnessPenalty(**given)(batch),
        {"model": trains, "batch": probe} | optional(target=0.1, layers="all", map="attention", rows=None, products=1),
        penalised,
    ),
    "clip_": Call(
        hs.clip_, {"layer": own_layer, "x": tokens} | optional(target=0.5, quantity="logit", parts="qk", layers="all"), clipped
    ),
    "clip_ of a model": Call(
        hs.clip_, {"layer": trains, "x": probe} | optional(target=0.5, quantity="logit", parts="qk", layers=[0]), clipped, 0.5
    ),
    "sdpa": Call(
        hs.sdpa,
        {name: lambda: tokens()[None, None] for name in ("query", "key", "value")}
        | optional(attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, window=None, softcap=None),
        attended,
        2.0,
    ),
    "varlen": Call(
        hs.varlen,
        {name: lambda: tokens()[:, None] for name in ("query", "key", "value")}
        | {"cu_seq_q": lambda: torch.tensor([0, 2, len(tokens())], dtype=torch.int32)}
        | optional(scale=None, window_size=(-1, 0), softcap=None, enable_gqa=False),
        anything,
        0.5,
    ),
    "use_sdpa": Call(in_context, {}, anything, 0.1),
    "patch": Call(hs.patch, {"model": trains}, anything, 0.25),
    "growth": Call(hs.growth, STUDY | optional(map="attention", seed=0), grown, 0.5),
    "inspect": Call(hs.inspect, STUDY | optional(map="attention", seed=0), grown, 0.25),
}
ANSWERS = {"Capture", "Estimate", "Gain", "Lens", "Model", "Spectrum"}  # made by the package alone


def one_sentence(error: HowSmoothError) -> None:
    text = str(error)
    assert text.startswith("expected "), text
    assert " got " in text, text
    assert "\n" not in text, text
    assert "object at 0x" not in text, text
    assert len(text) < 400, text
    assert type(error) is not HowSmoothError
    text.encode()  # no half of a character


def attempt(name: str, given: Arguments, drawn: dict[str, str]) -> bool:
    """One call; whether it was answered."""
    call = CALLS_OF[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = call.function(**given)
            call.check(answer, given)
    except HowSmoothError as error:
        one_sentence(error)
        return False
    except Exception as error:
        error.add_note(f"{name} with {drawn}")
        raise
    return True


def arguments(name: str, choose: random.Random) -> tuple[Arguments, dict[str, str]]:
    """Good arguments but for one or two, and the names of those."""
    given = {slot: value() for slot, value in CALLS_OF[name].good.items()}
    drawn = {}
    for slot in choose.sample(sorted(given), min(len(given), choose.choice((1, 1, 1, 2)))):
        alike = hostile.TENSORS if isinstance(given[slot], Tensor) else hostile.VALUES
        how = choose.choice(("stretched", "alike", "any"))
        if how == "stretched":
            given[slot] = hostile.stretched(given[slot], choose)
            drawn[slot] = f"stretched to {given[slot]!r}"
        else:
            drawn[slot] = choose.choice(sorted(alike) if how == "alike" else hostile.NAMES)
            given[slot] = hostile.draw(drawn[slot])
            if isinstance(given[slot], OWN.get(slot, ())):
                given[slot] = None
    return given, drawn


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("part", first(range(PARTS)))
def test_hostile_arguments(part: int):
    choose = random.Random(part)
    names, shares = list(CALLS_OF), [call.share for call in CALLS_OF.values()]
    for name in choose.choices(names, shares, k=CALLS // PARTS):
        attempt(name, *arguments(name, choose))


@pytest.mark.parametrize("name", CALLS_OF)
def test_good_arguments_are_answered(name: str):
    """What is spoilt above is the drawn argument and nothing else."""
    good = {slot: value() for slot, value in CALLS_OF[name].good.items()}
    if ("text" in good and "capture" in name) or name == "Model.text":  # the model was built in memory, without a tokenizer
        assert not attempt(name, good, {})
    else:
        assert attempt(name, good, {})


def test_every_public_name_is_called():
    called = {name.split(".")[0].split(" ")[0] for name in CALLS_OF}
    assert set(hs.__all__) - ANSWERS - called == {
        "DenseSVD", "HowSmoothError", "context_parallel", "kinds"  # tests/test_parallel.py, tests/kernels/test_kinds.py
    }  # fmt: skip


def test_the_checks_can_fail():
    estimate = hs.lipschitz(torch.sin, torch.ones(2))
    with pytest.raises(AssertionError, match="below"):
        holds(estimate, 2 * estimate.upper)
    with pytest.raises(AssertionError, match="above"):
        holds(estimate, estimate.lower / 2)
    with pytest.raises(AssertionError):
        one_sentence(hs.HowSmoothError("bad input"))
