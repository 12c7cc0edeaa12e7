"""What people type first, and what they get: torch's modules, positions, names nearly right, indices, functions that raise."""

import pytest
import torch
from torch import nn

import howsmooth as hs
from howsmooth.errors import BadFunctionError, BadInputError
from howsmooth.models import loading
from howsmooth.search import attack, configurations, worst_configuration
from howsmooth.spectral import top_pairs
from howsmooth.theory.around import Neighbourhood

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> hs.Model:
    return hs.load("demo", device="cpu")


@pytest.fixture(scope="module")
def capture(model) -> hs.Capture:
    return model.capture(["A cat sat on the mat.", "A dog."])


def attention(**more) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(4, 2, **more)


def test_torch_attention_is_self_attention():
    module = attention(batch_first=True).double()
    x = X.double()
    whole = torch.autograd.functional.jacobian(lambda t: module(t, t, t, need_weights=False)[0], x)
    exact = torch.linalg.matrix_norm(whole.reshape(16, 16), 2)
    assert hs.lipschitz(module, x).value == pytest.approx(float(exact), rel=1e-10)
    assert hs.lipschitz_batch(module, x[None]).value.tolist() == pytest.approx([float(exact)], rel=1e-10)
    assert hs.jacobian(module, x).shape == (16, 16)
    assert hs.bounds(module, x).measured == pytest.approx(float(exact), rel=1e-10)
    assert hs.lipschitz(module, x, within=0.01).upper >= float(exact)
    assert hs.splitting(module, x).moved.value == pytest.approx(float(exact), rel=1e-10)
    assert hs.worst_case(module, 3, 1.0, steps=1, restarts=1).value > 0


def test_other_torch_attention_is_refused_in_one_sentence():
    sentence = r"expected self-attention .*, got .*; pass it to howsmooth\.load and measure it"
    for module in (attention(kdim=3), attention(add_bias_kv=True), attention(add_zero_attn=True)):
        with pytest.raises(BadInputError, match=sentence):
            hs.lipschitz(module, X)


def test_text_and_layer_by_position(model):
    named = model.measure(text="A cat sat.", layer=3, map="heads")
    assert model.measure("A cat sat.", 3, "heads").value == named.value
    assert model.measure("A cat sat.", 3, head=1).head == 1
    several = model.measure("A cat sat.", layers=[0, 1])
    assert [m.layer for m in several] == [0, 1]
    assert model.measure("A cat sat.", [0, 1]).value.tolist() == several.value.tolist()
    assert model.capture("A cat sat.").measure(0, factor=2.0).radius_rms == pytest.approx(
        model.measure("A cat sat.", 0, factor=2.0).radius_rms
    )


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"layr": 1}, "got 'layr'; did you mean layer"),
        ({"heds": True}, "got 'heds'; did you mean heads"),
        ({"tol_": 1e-2}, "got 'tol_'; did you mean tol"),
        ({"within_radius": 1.0}, "got 'within_radius'"),
        ({"layer": 0, "layers": [0, 1]}, "expected either layer or layers, got both"),
        ({"layers": "all"}, "expected a list of layers, got 'all'"),
        ({"layers": 0}, "expected a list of layers, got 0; pass layer=0"),
    ],
)
def test_names_that_are_not_there(model, capture, how, words):
    with pytest.raises(BadInputError, match=words):
        model.measure("A cat.", **how)
    with pytest.raises(BadInputError, match=words):
        capture.measure(**how)


def test_inputs_that_are_not_there(model):
    for call in (model.capture, model.measure):
        with pytest.raises(BadInputError, match="got 'txt'; did you mean text"):
            call(txt="A cat.")
        with pytest.raises(BadInputError, match="got 'inputs_ids'; did you mean input_ids"):
            call(inputs_ids=[1, 2])
    with pytest.raises(BadInputError, match="a text of whole characters, got list"):
        model.measure([1, 2, 3], 0)


def test_a_wrapper_takes_its_own_names():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

        def forward(self, **given):
            return self.inner(given["features"])

    assert hs.load(Wrapper()).measure(features=X[None], layer=0).n == 4


@pytest.mark.parametrize("index", [2, -3, "a", 1.0, None, slice(2, 2)])
def test_windows_that_are_not_there(capture, index):
    with pytest.raises(BadInputError, match="expected a window"):
        capture[index]


def test_windows(capture):
    assert [len(c.window) for c in capture] == [9, 5]
    assert (len(capture[-1].window), len(capture[:1]), len(capture[::-1])) == (5, 1, 2)
    assert capture[::-1][0].window == capture[1].window


def test_heads_that_are_not_there(capture):
    one = capture[0]
    for ask in (
        lambda: one.measure(0, head=99),
        lambda: one.map(0, head=99),
        lambda: one.attention(0).head(99),
        lambda: configurations(one.attention(0), 4, hs.Ball(1.0), head=99),
    ):
        with pytest.raises(BadInputError, match=r"expected a head .*11, got 99"):
            ask()


class OwnError(Exception):
    """An error of someone else's making."""


ERRORS = [KeyError("no\nsuch key"), OwnError(), AttributeError("no such attribute"), IndexError(), ZeroDivisionError("by zero")]
VERBS = {
    "lipschitz": lambda f: hs.lipschitz(f, X),
    "lipschitz_batch": lambda f: hs.lipschitz_batch(f, X[None]),
    "jacobian": lambda f: hs.jacobian(f, X),
    "splitting": lambda f: hs.splitting(f, X),
    "smoothness": lambda f: hs.smoothness(f, X),
    "worst_case": lambda f: hs.worst_case(f, over=hs.BallAround(X, 1.0), steps=1, restarts=1),
    "certified_radius": lambda f: hs.certified_radius(f, X),
    "attack": lambda f: attack(f, X),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_function_that_raises(verb: str, error: Exception):
    def f(x):
        raise error

    sentence = rf"expected .*, got an error from it \({type(error).__name__}"
    with pytest.raises((BadFunctionError, BadInputError), match=sentence) as refused:
        VERBS[verb](f)
    assert refused.value.__cause__ is error
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("verb", VERBS)
def test_memory_that_runs_out_is_told_as_it_is(verb: str):
    def f(x):
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        VERBS[verb](f)


def test_our_own_refusals_pass_through():
    def f(x):
        raise BadInputError("expected a cat, got a dog; call the dog")

    with pytest.raises(BadInputError, match="expected a cat"):
        hs.lipschitz(f, X)


def test_names_go_to_a_gpu_and_modules_stay(monkeypatch):
    asked: list[object] = []
    own = loading.measuring_device
    monkeypatch.setattr(loading, "measuring_device", lambda device: (asked.append(device), own(None))[1])
    assert hs.load("demo").notes == ()
    hs.load("demo", device="cpu")
    hs.load(attention())
    assert asked == ["auto", "cpu", None]


def test_a_gpu_that_idles_is_told_of(monkeypatch):
    assert hs.load(attention()).notes == ()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (note,) = hs.load(attention()).notes
    assert "GPU that idles" in note
    assert hs.load(attention(), device="cpu").notes == ()
    measured = hs.load(attention()).measure(inputs=X[None], layer=0)
    assert note in measured.notes


@pytest.mark.parametrize(
    "shown",
    [
        *(lambda m, c: c, lambda m, c: m, lambda m, c: c[0].map(1), lambda m, c: c[0].attention(1), lambda m, c: c[0].sample),
        *(lambda m, c: c[0].window, lambda m, c: m.text("A cat. " * 500), lambda m, c: c[0].measure(0)),
        *(lambda m, c: hs.BallAround(X, 1.0), lambda m, c: hs.BallAround(X, 1.0, per="token"), lambda m, c: hs.Ball(1.0)),
        *(lambda m, c: hs.jacobian(torch.sin, X), lambda m, c: hs.jacobian(torch.sin, X).operator),
        *(lambda m, c: hs.Measure(X), lambda m, c: hs.Gaussian(torch.zeros(2), torch.eye(2)), lambda m, c: hs.GolubKahan()),
        *(lambda m, c: attack(torch.sin, X, 0.1)[0], lambda m, c: Neighbourhood.of(X, 0.1)),
        lambda m, c: worst_configuration(hs.Attention.from_matrices(torch.eye(4), torch.eye(4)), 4, 1.0),
        lambda m, c: top_pairs(hs.jacobian(torch.sin, X).operator, 1, seeds=[0]),
    ],
)
def test_what_is_shown_is_short(model, capture, shown):
    text = repr(shown(model, capture))
    assert len(text) < 260
    assert "\n" not in text
    assert "tensor(" not in text
    assert " object at " not in text
