"""Rows of studies are what `Model.measure` says, whichever way they are measured; bad questions are refused."""

# numbers of these rows are there: the study is small
# pyright: reportArgumentType=false, reportCallIssue=false

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.models import closed
from howsmooth.study.heads import HeadRow, head_jobs
from howsmooth.study.jobs import EstimateRow, run_here
from howsmooth.study.layers import LayerRow, layer_jobs
from howsmooth.study.maps_beside import MapRow, map_jobs
from howsmooth.study.reader import Reader, fingerprint, prepare, read_text
from howsmooth.study.scope import Scope, settle
from howsmooth.study.token import FrozenRow
from problems import readers
from problems.zoo import ZOO, randomize


@pytest.mark.slow
def test_closed_forms_in_lock_step_are_what_the_model_says():
    reader = readers.reader()
    setting = settle(reader, Scope((8, 20), samples=3, tol=1e-6))
    rows = run_here(reader, layer_jobs(setting, shares=True)).of(LayerRow)
    assert len(rows) == 2 * 2 * 3
    assert all(reader.capture(20, [0]).closed(layer) for layer in range(2))  # measured in closed form
    for row in rows:
        captured = reader.model.capture(ids=reader.window(row.n, row.start))
        truth = captured.measure(row.layer, tol=1e-6)
        assert row.value == pytest.approx(truth.value, rel=1e-5)
        assert row.radius == pytest.approx(truth.radius_rms)
        assert row.radius_max == pytest.approx(truth.radius_max)
        assert (row.shares is not None) == (row.sample == 0)
        if row.sample == 0:
            assert row.shares is not None
            assert sum(row.shares) == pytest.approx(1, abs=1e-5)
            assert len(row.shares) == row.n


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["heads", "block", "model"])
def test_other_maps_are_what_the_model_says(kind):
    reader = readers.reader()
    rows = run_here(reader, layer_jobs(settle(reader, Scope((8,), samples=1, map=kind)))).of(LayerRow)
    captured = reader.model.capture(ids=reader.window(8, 0))
    assert [row.value for row in rows] == [captured.measure(layer, kind).value for layer in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("build", [readers.bert, readers.gpt2, ZOO["llama"].build, ZOO["mpnet"].build])
def test_rows_hold_for_every_kind_of_layer(build):
    """Plain, causal, rotary and grouped, and one whose attention cannot be cut out; no warning leaves a study."""
    reader = Reader.of(hs.load(randomize(build())), readers.ids())
    setting = settle(reader, Scope((9,), samples=2, tol=1e-6))
    rows = run_here(reader, layer_jobs(setting) + head_jobs(setting)).of(EstimateRow)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured = reader.model.capture(ids=reader.window(9, 0))
        for row in rows:
            if row.sample == 0 and row.layer == 1:
                head = row.head if isinstance(row, HeadRow) else None
                assert row.value == pytest.approx(captured.measure(1, head=head, tol=1e-6).value, rel=1e-5)
    heads = captured.heads(1)
    assert sum(row.kind == "head" for row in rows) == 2 * heads
    assert {row.cut for row in rows if row.kind == "layer"} == {heads > 0}


@pytest.mark.slow
@pytest.mark.parametrize("build", [readers.gpt2, ZOO["llama"].build, ZOO["mpnet"].build])
def test_the_frozen_token_and_the_maps_beside_are_what_the_model_says(build):
    reader = Reader.of(hs.load(randomize(build())), readers.ids())
    setting = settle(reader, Scope((5, 9), samples=2, tol=1e-6))
    found = run_here(reader, layer_jobs(setting, beside={"token": [setting.longest]}) + map_jobs(setting))
    captured, count = reader.model.capture(ids=reader.window(9, 0)), len(setting.layers)
    whole = {row.layer: row for row in found.of(LayerRow) if (row.n, row.sample) == (9, 0)}
    assert [row.layer for row in found.of(FrozenRow)] == list(range(count))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in found.of(FrozenRow):
            beside, others = whole[row.layer], [i for i in range(9) if i != row.token]
            assert (row.n, row.sample) == (9, 0)
            assert row.whole == beside.value
            assert (row.token, row.share) == (beside.top_token, beside.top_share)
            assert row.value == pytest.approx(captured.measure(row.layer, tokens=others, tol=1e-6).value, rel=1e-2)
            assert row.value < row.whole
        for row in found.of(MapRow):
            truth = captured.measure(row.layer, row.map, tol=1e-6)
            assert row.value == pytest.approx(truth.value, rel=1e-2)
            assert row.relative == pytest.approx(truth.relative, rel=1e-2)
    maps = ["normed", "block"] if build is not ZOO["mpnet"].build else ["block"]  # it normalises behind its attention
    assert [(row.map, row.layer) for row in found.of(MapRow)] == [(name, k) for name in maps for k in range(count)]


def test_nothing_is_frozen_where_there_is_one_token():
    reader = readers.reader()
    setting = settle(reader, Scope((1,), samples=1))
    rows = run_here(reader, layer_jobs(setting, beside={"token": [1]})).rows
    assert {row.kind for row in rows} == {"layer"}


def test_heads_add_up_to_the_layer():
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    attn = hs.Attention(
        normal(12, 5), normal(6, 5), normal(4, 5), normal(7, 8), heads=4, kv_heads=2, b_q=normal(12), b_v=normal(4),
        b_o=normal(7), bias=normal(1, 4, 6, 6), softcap=3.0,
    )  # fmt: skip
    x = normal(6, 5)
    parts = [attn.head(h)(x) for h in range(4)]
    assert attn.b_o is not None
    torch.testing.assert_close(sum(parts) + attn.b_o, attn(x))
    assert not torch.allclose(parts[0], parts[1])


def test_samples_begin_at_the_opening_and_at_random_and_lengths_share_them():
    reader = readers.reader()
    starts = reader.starts(5, 40, seed=1)
    assert starts[0] == 0
    assert len(set(starts)) == 5
    assert starts != reader.starts(5, 40, seed=2)
    assert starts[:3] == reader.starts(3, 40, seed=1)
    long, short = reader.window(40, starts[1]).ids, reader.window(9, starts[1]).ids
    assert long[:9] == short


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"lengths": ()}, "at least one token, got none"),
        ({"lengths": (0,)}, "lengths of at least one token, got 0"),
        ({"lengths": 8}, "a list of lengths, each of at least one token, got 8"),
        ({"lengths": "8"}, "a list of lengths"),
        ({"lengths": (8.0,)}, "lengths of at least one token, got 8.0"),
        ({"samples": 0}, "one sample"),
        ({"samples": 2.5}, "one sample or more, a whole number, got 2.5"),
        ({"layers": (2,)}, "layers from 0 to 1, got 2"),
        ({"layers": (-1,)}, "layers counted from 0, got -1"),
        ({"layers": 1}, "a list of layers, got 1"),
        ({"layers": ()}, "a layer or more"),
        ({"map": "mlp"}, "a map among"),
        ({"samples": 1, "map": "normed"}, "normalises before"),
        ({"seed": -1}, "a whole seed, at least 0"),
        ({"lengths": (readers.POSITIONS + 1,)}, f"at most {readers.POSITIONS} tokens"),
        ({"lengths": (81,), "samples": 1}, "text with 1 windows of 81"),
        ({"lengths": (40,), "samples": 60}, "longer text, fewer samples"),
    ],
)
def test_questions_that_cannot_be_answered(question, message):
    with pytest.raises(BadInputError, match=message):
        settle(readers.reader(), Scope(**({"lengths": (8,)} | question)))


def test_numbers_of_numpy_are_numbers():
    question = Scope(np.array([8, 16]), samples=np.int64(2), layers=[np.int64(1)], seed=np.int64(3))  # pyright: ignore
    assert question == Scope((8, 16), samples=2, layers=(1,), seed=3)
    assert {type(n) for n in (*question.lengths, question.samples, question.seed)} == {int}


def test_a_worker_refuses_another_text_or_model(tmp_path):
    folder, text = readers.save(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text(readers.text())
    source = Reader.by_name(str(folder), str(text)).source
    assert source is not None
    assert prepare(**source.to_dict()).text.text == readers.text()
    text.write_text(readers.text(seed=1))
    with pytest.raises(BadInputError, match="the text that the study was planned with"):
        prepare(**source.to_dict())
    text.write_text(readers.text())
    readers.save(folder, readers.bert(1))
    with pytest.raises(BadInputError, match="the model that the study was planned with"):
        prepare(**source.to_dict())


def test_the_mark_of_a_model_sees_its_weights():
    model = hs.load(readers.bert())
    before = fingerprint(model)
    assert before == fingerprint(hs.load(readers.bert()))
    with torch.no_grad():
        model.module.get_submodule("encoder.layer.1.output.dense").weight.add_(1e-3)  # pyright: ignore[reportCallIssue]
    assert fingerprint(model) != before


def test_texts_that_cannot_be_read(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "bytes", tmp_path / "missing", tmp_path):
        with pytest.raises(BadInputError, match="expected a text file"):
            read_text(str(path))
    assert read_text(None).startswith("ALICE")


def test_a_reader_holds_only_the_last_windows():
    reader = readers.reader()
    first = reader.capture(8, [0, 3])
    assert reader.capture(8, [0, 3]) is first
    assert len(first) == 2
    assert reader.capture(8, [3]) is not first
    assert first[0].tokens(0).shape == (8, 16)


@pytest.mark.slow
def test_a_closed_form_is_kept_for_shorter_inputs_only_where_it_is_the_same_layer(monkeypatch):
    reader = readers.reader()
    long, short = reader.model.capture([reader.window(20, 0)]), reader.model.capture([reader.window(8, 0)])
    kept = long.closed(1)
    assert kept is not None
    assert short.closed(1) is kept
    monkeypatch.setattr(closed, "_fits", lambda *_: False)
    monkeypatch.setattr(closed, "as_attention", lambda *_: replace(kept, causal=True))
    assert short.closed(1) is kept  # tried before
    other = reader.model.capture([reader.window(8, 1)]).closed(1)  # its output says otherwise, so it is read off anew
    assert other is not None
    assert other.causal
    monkeypatch.undo()
    again = long.closed(1)
    assert again is not None
    assert not again.causal  # a longer input is read off anew
