"""Radius, norms, bounds, splitting, worst, positions: each against what it must equal or never exceed."""

# numbers of these rows are there: the study is small
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportOptionalOperand=false

import gc
import math
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
import torch

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.kernels.kinds import Linear, Sigmoid, Softmax
from howsmooth.models import MapName
from howsmooth.run.files import write_table
from howsmooth.study import ceilings
from howsmooth.study.ceilings import BoundsRow
from howsmooth.study.changes import ChangeRow, change_jobs
from howsmooth.study.halves import SPLITTING, SplittingRow, splitting_jobs
from howsmooth.study.jobs import Job, run_here, run_sweep
from howsmooth.study.layers import LayerRow, layer_jobs
from howsmooth.study.nearby import NearRow, near_jobs
from howsmooth.study.norms import NormRow, norm_in_front
from howsmooth.study.positions import position_break
from howsmooth.study.question import questions
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Scope, Setting, settle
from howsmooth.study.sizes import SizeRow
from howsmooth.study.worst import WorstRow, in_words, worst_jobs
from problems import readers
from problems.zoo import ZOO, ids, randomize


def asked(reader: Reader, *lengths: int, samples: int = 1, map: MapName = "attention", tol: float = 1e-3) -> Setting:
    return settle(reader, Scope(lengths or (10,), samples, map=map, tol=tol))


def jobs_of(name: str, setting: Setting, **options) -> list[Job]:
    """The first batch of a question."""
    return next(questions()[name].tasks(setting, **options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "block"])
def test_radius_is_the_map_at_scaled_tokens(kind):
    reader = readers.reader()
    rows = run_here(reader, jobs_of("radius", asked(reader, map=kind), factors=[0.5, 1.0, 3.0])).of(SizeRow)
    plain = run_here(reader, layer_jobs(asked(reader, map=kind))).of(LayerRow)
    ones = [row for row in rows if row.factor == 1.0]
    assert [row.value for row in ones] == pytest.approx([row.value for row in plain], rel=1e-3)
    assert [row.radius for row in ones] == pytest.approx([row.radius for row in plain])
    cut = reader.capture(10, [0]).map(1, kind)
    for row in rows:
        if row.layer == 1:
            truth = hs.lipschitz(cut, row.factor * cut.start)
            assert row.value == pytest.approx(truth.value, rel=2e-3)
            assert row.radius == pytest.approx(row.factor * ones[1].radius)


@pytest.mark.parametrize("factors", [[], [0.0], [-1.0], [math.nan]])
def test_bad_factors(factors):
    reader = readers.reader()
    with pytest.raises(BadInputError, match="positive factors"):
        jobs_of("radius", asked(reader), factors=factors)


def test_the_norm_in_front_of_a_pre_norm_block_is_its_own():
    reader = readers.reader(readers.gpt2())
    rows = run_here(reader, jobs_of("norms", asked(reader, tol=1e-6))).of(NormRow)
    captured = reader.capture(10, [0])
    for layer in range(2):
        normed = next(r for r in rows if (r.layer, r.map) == (layer, "normed"))
        assert normed.value == pytest.approx(captured.measure(layer, "normed", tol=1e-6).value, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama", "gemma2 global"])
def test_norms_of_every_kind_are_found_and_multiply(name):
    build = readers.bert if name == "bert" else ZOO[name].build
    reader = Reader.of(hs.load(randomize(build())), readers.ids())
    rows = run_here(reader, jobs_of("norms", asked(reader))).of(NormRow)
    by = {(r.layer, r.map): r.value for r in rows}
    for layer in (0, 1):
        assert by[layer, "normed"] <= by[layer, "attention"] * by[layer, "norm"] * 1.01


def test_a_layer_without_a_norm_in_front_has_none():
    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x, x, x, need_weights=False)[0]
            return x

    assert norm_in_front(readers.reader().capture(10, [0]), 1) is not None
    assert norm_in_front(hs.load(Bare().double()).capture(inputs=torch.randn(1, 5, 8)), 1) is None


def test_upper_bounds_are_above_and_lower_ones_speak_of_the_ball():
    reader = readers.reader()
    rows = run_here(reader, jobs_of("bounds", asked(reader, 8, 16))).of(BoundsRow)
    assert len(rows) == 4
    for row in rows:
        upper = [b for b in row.each if b.side == "upper" and b.log_value is not None]
        assert {"point", "ball"} == {b.where for b in upper}
        assert all(b.log_value >= math.log(row.value) for b in upper)
        assert all(b.reason for b in row.each if b.log_value is None)


def test_bounds_that_fail_leave_the_measurement_and_say_why(monkeypatch: pytest.MonkeyPatch):
    def fails(*_):
        raise RuntimeError("no decomposition")

    monkeypatch.setattr(ceilings, "point_bounds", fails)
    reader = readers.reader()
    measured = run_here(reader, jobs_of("bounds", asked(reader, 8)))
    assert len(measured.of(LayerRow)) == 2
    assert {(row.reason, len(row.bounds)) for row in measured.of(BoundsRow)} == {("no decomposition", 0)}


def test_norms_of_weights_go_with_their_layer():
    reader, before = readers.reader(), set(ceilings._KNOWN)
    run_here(reader, jobs_of("bounds", asked(reader, 8)))
    assert len(set(ceilings._KNOWN) - before) == 2
    del reader, before
    gc.collect()
    assert len(ceilings._KNOWN) == 0


def test_bounds_as_a_table(tmp_path: Path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install 'howsmooth[parquet]' runs this")
    folder, text = readers.save(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text(readers.text())
    reader = Reader.by_name(str(folder), str(text))
    run_sweep(reader, jobs_of("bounds", asked(reader, 8)), tmp_path / "r.sqlite")
    table = pandas.read_parquet(write_table(tmp_path / "r.sqlite", tmp_path / "r.parquet"))
    assert sorted(table["kind"]) == ["bounds", "bounds", "layer", "layer"]


def test_splitting_is_that_of_the_closed_form():
    reader = readers.reader()
    rows = run_here(reader, splitting_jobs(asked(reader, samples=2))).of(SplittingRow)
    assert len(rows) == 4
    captured = reader.capture(10, [0])
    truth = hs.splitting(captured.attention(1), captured.tokens(1).double())
    row = next(r for r in rows if (r.layer, r.sample) == (1, 0))
    assert row.moved == pytest.approx(truth.moved.value, rel=2e-3)
    assert row.value == pytest.approx(truth.split.value, rel=2e-3)
    assert row.pays == truth.pays


@pytest.mark.slow
def test_layers_with_sinks_have_all_answers_but_bounds_near_the_text():
    module = randomize(ZOO["gpt-oss local"].build())
    found = hs.inspect(hs.load(module), ids(n=40)[0].tolist(), lengths=(6, 8), samples=1)
    said = "Layers 0, 1 have no bounds near the text: not proved beside a learned sink."
    assert said in found.data.notes
    assert found.failures == ()
    assert found.data.of(NearRow) == []
    assert [row.layer for row in found.data.of(SplittingRow)] == [0, 1]


def test_layers_whose_tokens_cannot_be_split_are_named_before_any_task():
    reader = readers.reader()
    setting = asked(reader)
    assert setting.kinds == (Softmax(), Softmax())
    assert SPLITTING.lacking(setting) == ()
    mixed = replace(setting, kinds=(Sigmoid(), Softmax()))
    reason = "weights count tokens there, and halves of one would count twice"
    assert SPLITTING.lacking(mixed) == (f"layer 0 has no splitting: {reason}",)
    assert [job.arguments["part"]["layers"] for job in splitting_jobs(mixed)] == [(1,)]
    none = replace(setting, kinds=(Sigmoid(), Linear(normalized=False)))
    assert SPLITTING.lacking(none) == (f"layers 0, 1 have no splitting: {reason}",)
    assert splitting_jobs(none) == []
    unknown = replace(setting, kinds=(None, None))
    assert len(splitting_jobs(unknown)) == 2


@pytest.mark.slow
def test_near_the_text_constants_are_attained_and_certified():
    reader = readers.reader()
    rows = run_here(reader, near_jobs(asked(reader), 10)).of(NearRow)
    assert [row.layer for row in rows] == [0, 1]
    captured = reader.capture(10, [0])
    for row in rows:
        ends = [row.value, *row.lower_ends]
        assert ends == sorted(ends)
        assert all(a <= b for a, b in zip(row.lower_ends, row.upper_ends, strict=True))
        assert row.upper_ends == sorted(row.upper_ends)
        assert row.upper_ends[0] < 1.01 * row.value
        x = captured.tokens(row.layer).double()
        truth = hs.lipschitz(captured.attention(row.layer), x, within=1e-3 * row.size)
        assert row.lower_ends[1] <= truth.upper
        assert truth.lower <= row.upper_ends[1]


@pytest.mark.slow
def test_a_change_of_the_output_needs_more_than_what_is_certified():
    reader = readers.reader()
    rows = run_here(reader, change_jobs(asked(reader, samples=2), 10, 0.1)).of(ChangeRow)
    assert [(row.layer, row.sample) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for row in rows:
        assert 0 < row.certified <= row.first_order
        assert row.certified <= row.attacked
        captured = reader.capture(10, [row.start])
        layer, x = captured.attention(row.layer), captured.tokens(row.layer)
        y = layer(x)
        step = hs.lipschitz(layer, x).direction
        step = step / step.norm(dim=-1).max() * row.certified
        assert float((layer(x + step) - y).norm()) <= 0.1 * float(y.norm())


@pytest.mark.slow
def test_worst_inputs_stay_below_the_ceiling():
    reader = readers.reader()
    rows = run_here(reader, worst_jobs(asked(reader), [10])).of(WorstRow)
    plain = {r.layer: r.value for r in run_here(reader, layer_jobs(asked(reader))).of(LayerRow)}
    for row in rows:
        assert row.text == pytest.approx(plain[row.layer], rel=2e-3)
        assert math.log(row.value) <= row.log_ceiling
    assert in_words("random start 3") == "random start 3"


@pytest.mark.filterwarnings("ignore::howsmooth.models.FallbackWarning")
def test_layers_that_are_no_closed_form_have_no_bounds_and_other_maps_no_jobs():
    reader = Reader.of(hs.load(randomize(ZOO["deberta-v2"].build())), readers.ids())
    setting = asked(reader)
    jobs = splitting_jobs(setting) + worst_jobs(setting, [10]) + near_jobs(setting, 10)
    assert run_here(reader, jobs).rows == ()
    assert not run_here(reader, jobs_of("bounds", setting)).of(BoundsRow)
    block = asked(reader, map="block")
    assert jobs_of("bounds", block) + splitting_jobs(block) + worst_jobs(block, [10]) == []
    assert near_jobs(block, 10) + change_jobs(block, 10, 0.1) == []


def test_positions_that_break_are_found_where_they_do():
    module = readers.bert()
    table = module.embeddings.position_embeddings.weight
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        table.copy_(torch.randn(1, 16, generator=random) + 0.1 * torch.randn(table.shape, generator=random))
        table[24:] += 3.0
    model = hs.load(module)
    found = position_break(model, 24, 30)
    assert found is not None
    assert found.position == 25
    assert found.step > 5 * found.typical
    assert position_break(model, 8, 16) is None
    assert position_break(model, 500, 600) is None
    assert position_break(hs.load(ZOO["llama"].build()), 24, 30) is None
