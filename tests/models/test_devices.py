"""Where a model is measured: by name, lent block by block, spread by the library; and what is said where it does not fit."""

import warnings

import pytest
import torch
import transformers as t
from torch import nn

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.models import model, recorded, room
from howsmooth.models.room import enough, too_little
from howsmooth.program.modules import Loans, watching
from problems.zoo import GROUPED, TOKENS, ids, randomize

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def llama() -> nn.Module:
    return randomize(t.LlamaModel(t.LlamaConfig(**GROUPED, **TOKENS)))


def test_running_out_of_memory_is_one_sentence():
    with pytest.raises(BadInputError, match=r"of GPU memory for a map, got .* free; give fewer tokens"):
        raise too_little("a map", "at least 3.0 GiB", 2**30)


def test_weights_come_and_go_with_their_block():
    """On one device everything is in place; a loan to another is tried out on a GPU."""
    own = llama()
    before = {k: v.data_ptr() for k, v in own.state_dict().items()}
    loans = Loans(own, torch.device("cpu"))
    with watching(loans.before, loans.after):
        own(ids())
    assert {k: v.data_ptr() for k, v in own.state_dict().items()} == before


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("map", ["attention", "block", "model"])
def test_weights_that_do_not_fit_stay_on_the_host(map, monkeypatch: pytest.MonkeyPatch):
    truth = hs.load(llama(), "cuda").measure(ids=ids(), layer=1, map=map)
    monkeypatch.setattr(model, "fits", lambda module, device: False)
    own = llama()
    lending = hs.load(own, "cuda")
    assert lending.device.type == "cuda"
    got = lending.measure(ids=ids(), layer=1, map=map)
    assert all(p.device.type == "cpu" for p in own.parameters())
    assert got.direction.is_cuda
    assert got.cut
    assert got.value == pytest.approx(truth.value, rel=1e-5)
    assert any("one block at a time" in note for note in got.notes)


@pytest.mark.gpu
@needs_gpu
def test_what_the_library_offloads():
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
    truth = hs.load(llama(), "cuda").measure(ids=ids(), layer=1, map="block")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = accelerate.cpu_offload(llama(), execution_device=torch.device("cuda", 0))
    spread = hs.load(own)
    assert spread.device == torch.device("cuda", 0)
    got = spread.measure(ids=ids(), layer=1, map="block")
    assert got.cut
    assert got.value == pytest.approx(truth.value, rel=1e-5)
    assert all(p.is_meta for p in own.parameters())
    with pytest.raises(BadInputError, match="device_map says where it goes"):
        hs.load(own, "cuda")


def test_room_is_counted_before_any_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "free", lambda device: 100_000)
    tokens, block, device = torch.zeros(100, 8), nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 8)), torch.device("cuda", 0)
    room.check_room(tokens, None, torch.float32, device, "attention")  # 12 · 8 numbers a token: 38 400 bytes
    room.check_room(tokens, block, torch.float32, torch.device("cpu"), "a block elsewhere")
    room.check_room(tokens, block, torch.float32, device, "a block")  # 3 · 48 more
    with pytest.raises(BadInputError, match=r"for a longer block, got 0\.0 GiB free; give fewer tokens"):
        room.check_room(tokens.repeat(2, 1), block, torch.float32, device, "a longer block")


@pytest.mark.gpu
@needs_gpu
def test_too_little_memory_is_said_first(monkeypatch: pytest.MonkeyPatch):
    captured = hs.load(llama(), "cuda").capture(ids=ids())
    monkeypatch.setattr(room, "free", lambda device: 100)
    with pytest.raises(BadInputError, match=r"at least .* GiB of GPU memory for map 'block' of layer 1 at 8 tokens"):
        captured.measure(1, "block")


@pytest.mark.gpu
@needs_gpu
def test_running_out_on_the_way_is_said_too():
    with pytest.raises(BadInputError, match="GiB of GPU memory for a map"), enough("a map", torch.device("cuda", 0)):
        torch.empty(2**50, device="cuda")


@pytest.mark.gpu
@needs_gpu
def test_tokens_may_be_kept_on_the_host(monkeypatch: pytest.MonkeyPatch):
    truth = hs.load(llama(), "cuda").measure(ids=ids(), layer=1, map="block")
    monkeypatch.setattr(recorded, "_KEPT", 2**62)
    captured = hs.load(llama(), "cuda").capture(ids=ids())
    assert {t.device.type for t in captured.sample.run.kept.values()} == {"cpu"}
    assert captured.measure(1, "block").value == pytest.approx(truth.value, rel=1e-6)
    assert captured.tokens(1).is_cuda
    assert captured.measure([0, 1], closed=True)[1].direction.is_cuda
