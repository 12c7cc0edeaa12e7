"""Many layers, heads and windows at once, whatever way the input comes."""

import pandas
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.models import Measurement, Measurements, Model
from marks import first
from problems import readers
from problems.zoo import ZOO, randomize


@pytest.fixture(scope="module")
def model() -> Model:
    return hs.load(readers.bert())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return readers.save(tmp_path_factory.mktemp("model"))


WINDOWS = [readers.ids(9, seed=s) for s in range(3)] + [readers.ids(6, seed=3)]


@pytest.mark.slow
@pytest.mark.parametrize("build", first([ZOO["llama"].build, readers.bert, readers.gpt2]))
def test_many_windows_are_each_window(build):
    """In lock step on closed forms, or one by one: every number is that of its own capture."""
    model = hs.load(randomize(build()))
    many = model.capture(WINDOWS).measure(heads=True, tol=1e-6)
    assert isinstance(many, Measurements)
    assert len(many) == 2 * len(WINDOWS)
    for k, got in enumerate(many):
        layer, window = divmod(k, len(WINDOWS))
        one = model.capture(ids=WINDOWS[window]).measure(layer, heads=True, tol=1e-6)
        assert (got.layer, got.n, got.map, got.cut) == (layer, len(WINDOWS[window]), "attention", True)
        assert got.value == pytest.approx(one.value, rel=1e-5)
        assert got.module == one.module
        assert got.tokens == one.tokens
        assert got.radius_rms == pytest.approx(one.radius_rms, rel=1e-6)
        assert got.logits == pytest.approx(one.logits, rel=1e-4)
        assert got.received == pytest.approx(one.received, rel=1e-4)
        assert [h.value for h in got.heads] == pytest.approx([h.value for h in one.heads], rel=1e-5)
        # of two directions and their images, the one that the constant says
        assert sum(got.output_share) == pytest.approx(1)


@pytest.mark.slow
def test_layers_by_name_are_layers(model: Model):
    captured = model.capture(ids=WINDOWS[0])
    everything = captured.measure()
    assert [m.layer for m in everything] == [0, 1]
    assert isinstance(captured.measure(1), Measurement)
    assert isinstance(captured.measure([1]), Measurements)
    assert captured.measure([1])[0].value == everything[1].value == captured.measure(1).value
    assert everything[:1][0].layer == 0
    with pytest.raises(BadInputError, match="expected a list of layers for a capture of 4 windows"):
        model.capture(WINDOWS).measure(1)
    with pytest.raises(BadInputError, match="expected a capture of one input, got 4 windows"):
        model.capture(WINDOWS).map(1)
    assert model.capture(WINDOWS)[3].tokens(1).shape == (6, 16)
    assert [len(c.window) for c in model.capture(WINDOWS)] == [9, 9, 9, 6]


def test_measurements_are_a_table(model: Model):
    measured = model.measure(ids=WINDOWS[0])
    frame = measured.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["layer"]) == [0, 1]
    assert list(frame["value"]) == [m.value for m in measured]
    lines = str(measured).splitlines()
    assert len(lines) == 4
    assert lines[1].split()[:3] == ["layer", "n", "L"]
    assert len(measured.to_dict()["items"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "block"])
def test_a_factor_scales_what_enters(model: Model, kind):
    captured = model.capture(ids=WINDOWS[0])
    cut = captured.map(1, kind)
    for closed in (False, True):
        got = captured.measure(1, kind, factor=3.0, closed=closed, tol=1e-6)
        assert got.value == pytest.approx(hs.lipschitz(cut, 3 * cut.start, tol=1e-6).value, rel=1e-5)
        assert got.radius_max == pytest.approx(3 * captured.measure(1, kind).radius_max)
    for factor in (0, -1.0, float("nan"), True):
        with pytest.raises(BadInputError, match="positive factor"):
            captured.measure(1, factor=factor)


@pytest.mark.slow
def test_what_a_tokenizer_gives_goes_in_as_it_is(folder):
    model, tokenizer = hs.load(folder), AutoTokenizer.from_pretrained(folder)
    text = "the cat sat on a mat"
    given = tokenizer(text, return_tensors="pt")
    by_text = model.measure(text=text, layer=1)
    by_name = model.measure(**given, layer=1)
    assert by_name.value == by_text.value
    assert by_name.tokens == by_text.tokens
    brought = hs.load(readers.bert(), tokenizer=tokenizer)
    assert brought.measure(text=text, layer=1).value == pytest.approx(by_text.value, rel=1e-6)
    padded = tokenizer([text, "the dog ran"], padding=True, return_tensors="pt")
    both = model.measure(**padded)
    assert [m.n for m in both] == [8, 5, 8, 5]
    assert both[2].value == pytest.approx(by_text.value, rel=1e-3)
    assert both[3].value == pytest.approx(model.measure(text="the dog ran", layer=1).value, rel=2e-3)
    with pytest.raises(BadInputError, match="got 'layr'"):
        model.measure(**given, layr=1)
    with pytest.raises(BadInputError, match="exactly one"):
        model.measure(**given, text=text, layer=1)


def test_a_wrapper_takes_what_it_hands_on():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = readers.bert()

        def forward(self, **given):
            return self.inner(**given)

    ids = torch.tensor([WINDOWS[0]])
    truth = hs.load(readers.bert()).measure(input_ids=ids, layer=1).value
    assert hs.load(Wrapper()).measure(input_ids=ids, layer=1).value == pytest.approx(truth, rel=1e-6)
    assert hs.load(Wrapper()).measure(inputs={"input_ids": ids}, layer=1).value == pytest.approx(truth, rel=1e-6)


def test_a_device_is_where_the_weights_are():
    module = readers.bert()
    assert hs.load(module).device == torch.device("cpu")
    assert hs.load(module, device="auto").device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert hs.load(module).to(torch.float64).dtype == torch.float64
    assert hs.load(module, "cpu").to("cpu").device == torch.device("cpu")
    for device in ("mps", "cuda:99", "gpu"):
        with pytest.raises(BadInputError, match=r"^expected a .*device"):
            hs.load(module, device=device)
        with pytest.raises(BadInputError, match=r"^expected a .*device"):
            hs.load(module).to(device)


def test_reprs_are_short(model: Model):
    captured = model.capture(WINDOWS)
    for thing in (model, captured, captured[0].attention(1)):
        assert len(repr(thing)) < 128
        assert "\n" not in repr(thing)
    assert "2 layers, 4 × 6 to 9 tokens" in repr(captured)


def test_torchs_own_attention_is_a_layer():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = torch.randn(5, 8, dtype=torch.float64)
    layer = hs.Attention.from_module(module)
    torch.testing.assert_close(layer(x), module(x[None], x[None], x[None])[0][0].detach())
    assert hs.lipschitz(layer, x).value == pytest.approx(hs.load(module).measure(inputs=x[None], layer=0).value, rel=1e-9)
