"""Growth, and the whole report: complete, repeatable, the same as a sweep, and true of the demo model."""

import math

import pytest

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.run import Local, Ray, read
from howsmooth.study.heads import HeadRow, head_jobs
from howsmooth.study.jobs import plan, run_here, run_sweep
from howsmooth.study.layers import layer_jobs
from howsmooth.study.reader import Reader
from howsmooth.study.scope import LENGTHS, Scope, fitting_lengths, settle
from problems import readers


def without_time(rows):
    return [{k: v for k, v in row.to_dict().items() if k != "seconds"} for row in rows]


def ordered(rows):
    return sorted(without_time(rows), key=lambda r: (r["kind"], r["layer"], r["n"], r["sample"], r.get("head", -1)))


@pytest.mark.slow
def test_growth_is_complete_and_repeatable():
    model = hs.load(readers.bert())
    found = hs.growth(model, readers.ids(), lengths=(6, 12, 24, 40), samples=5)
    assert [(r.layer, r.n, r.sample) for r in found.rows] == [
        (layer, n, sample) for layer in range(2) for n in (6, 12, 24, 40) for sample in range(5)
    ]
    again = hs.growth(model, readers.ids(), lengths=(40, 24, 12, 6), samples=5)
    assert without_time(found.rows) == without_time(again.rows)
    other = hs.growth(model, readers.ids(), lengths=(6, 12, 24, 40), samples=5, seed=1)
    assert without_time(found.rows) != without_time(other.rows)
    assert found.fits[1].method == "samples"
    frame = found.to_frame()
    assert len(frame) == 40
    wanted = "model layer map n sample value lower upper confidence radius exponent exponent_low exponent_high seconds seed"
    assert set(wanted.split()) <= set(frame.columns)
    assert "layer 1: L ~ n^" in str(found)
    assert [line["layer"] for line in found.table()] == [0, 1]


def test_default_lengths_fit_model_and_text():
    assert fitting_lengths(readers.reader(), 8) == (8, 16, 32)
    short = Reader.of(hs.load(readers.bert()), readers.ids(20))
    assert fitting_lengths(short, 8) == (8,)
    assert {128, 136} <= set(LENGTHS)


def test_one_length_has_no_fit():
    found = hs.growth(hs.load(readers.bert()), readers.ids(), lengths=(8,), samples=2)
    assert found.fits == {}
    assert found.table()[0]["exponent"] == "–"


@pytest.mark.slow
def test_a_sweep_gives_the_rows_of_a_run_here_and_resumes(tmp_path):
    folder, text = readers.save(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text(readers.text())
    reader = Reader.by_name(str(folder), str(text))
    assert reader.source is not None
    setting = settle(reader, Scope((8, 20), samples=2))
    jobs = layer_jobs(setting) + head_jobs(setting)
    here = run_here(reader, jobs)
    swept = run_sweep(reader, jobs, tmp_path / "two.sqlite", engine=Local(workers=2))
    assert ordered(swept.rows) == ordered(here.rows)

    run_sweep(reader, jobs[:2], tmp_path / "half.sqlite")
    seconds = {row.key: row.seconds for row in read(tmp_path / "half.sqlite")}
    resumed = run_sweep(reader, jobs, tmp_path / "half.sqlite", resume=True)
    assert ordered(resumed.rows) == ordered(here.rows)
    assert {row.key: row.seconds for row in read(tmp_path / "half.sqlite") if row.key in seconds} == seconds
    narrow = run_sweep(reader, jobs[:1], tmp_path / "half.sqlite", resume=True)
    assert len(narrow.rows) < len(resumed.rows)  # rows of another plan in the same file are left out


def test_a_task_that_fails_is_told_and_the_others_count(tmp_path):
    folder, text = readers.save(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text(readers.text())
    reader = Reader.by_name(str(folder), str(text))
    assert reader.source is not None
    jobs = layer_jobs(settle(reader, Scope((8, 20), samples=1)))
    for job in jobs[:1]:
        job.arguments["layers"] = [7]
    found = run_sweep(reader, jobs, tmp_path / "some.sqlite")
    assert len(found.failures) == 1
    assert {row.n for row in found.rows} == {8}
    with pytest.raises(BadInputError):
        run_sweep(reader, jobs[:1], tmp_path / "none.sqlite")
    with pytest.raises(BadInputError, match="nothing"):
        plan(reader.source, [])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")  # ray's own
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.weekly
def test_the_same_on_ray(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed; pip install 'howsmooth[ray]' runs this")
    folder = readers.save(tmp_path / "model")
    (tmp_path / "text.txt").write_text(readers.text())
    reader = Reader.by_name(str(folder), str(tmp_path / "text.txt"))
    assert reader.source is not None
    jobs = layer_jobs(settle(reader, Scope((8,), samples=2)))
    found = run_sweep(reader, jobs, tmp_path / "ray.sqlite", engine=Ray(workers=2))
    assert ordered(found.rows) == ordered(run_here(reader, jobs).rows)


@pytest.mark.slow
@pytest.mark.weekly
def test_the_demo_jumps_past_128_through_one_head():
    """The page must let a reader find it: where, by how much, which head, and that positions break there."""
    found = hs.inspect(hs.load("demo", device="cpu"), lengths=(16, 48, 96, 128, 136, 160, 192), samples=1, layers=[0])
    jump = next(b for b in found.data.fits[0].breaks if b.kind == "jump")
    assert (jump.before, jump.after) == (128, 136)
    assert 2 < jump.change.value < 4
    said = " ".join(found.findings)
    assert "One head carries it: head 2" in said
    assert "position embeddings break there too: those of positions 127 and 128" in said
    assert "Layer 0 jumps" in said
    heads = {(row.n, row.head): row.value for row in found.data.of(HeadRow)}
    assert heads[136, 2] > 5 * heads[128, 2]
    others = [heads[136, h] / heads[128, h] for h in range(12) if h != 2]
    assert max(map(abs, map(math.log, others))) < 0.1
