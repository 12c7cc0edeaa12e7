"""Files and folders: whole or not at all, never over something without being asked to; results as tables."""

import json
from pathlib import Path

import pandas
import pytest

from howsmooth.errors import BadInputError, ResultsError
from howsmooth.run import Plan, check_folder, check_writable, claim_folder, read, sweep, to_frame, write_table, writing
from howsmooth.run.store import Store
from problems import sweeps


@pytest.fixture
def results(tmp_path):
    mixed = Plan.of(sweeps.value, [{"i": i} for i in range(3)]) + Plan.of(sweeps.several, [{"count": 2}])
    sweep(mixed + Plan.of(sweeps.fussy, [{"i": 1}]), tmp_path / "r.sqlite")
    return tmp_path / "r.sqlite"


def test_a_record_per_row_with_arguments_values_and_state(results):
    frame = to_frame(results)
    assert len(frame) == 3 + 2 + 1
    assert frame["square"][:3].tolist() == [0, 1, 4]
    assert json.loads(str(frame["list"][2])) == [2, None, "é\n"]
    assert frame["part"][3:5].tolist() == [0, 1]
    assert frame["count"][3:5].tolist() == [2, 2]
    assert frame["status_of_task"].tolist() == ["done"] * 5 + ["failed"]
    assert str(frame["reason"][5]).startswith("expected an i")
    assert bool(frame["version_torch"].notna().all())


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_files_hold_the_same_table(results, tmp_path, ending):
    if ending == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install 'howsmooth[parquet]' runs this")
    out = write_table(results, tmp_path / f"table.{ending}")
    table = pandas.read_csv(out) if ending == "csv" else pandas.read_parquet(out)
    pandas.testing.assert_frame_equal(table, to_frame(results), check_dtype=False)
    with pytest.raises(ResultsError, match="--force"):
        write_table(results, out)
    write_table(results, out, force=True)
    assert {p.name for p in tmp_path.iterdir()} == {"r.sqlite", out.name}


def test_what_cannot_be_written_is_one_sentence(results, tmp_path, monkeypatch):
    with pytest.raises(BadInputError, match="change its ending"):
        write_table(results, tmp_path / "table.xlsx")
    with pytest.raises(ResultsError, match="choose another folder"):
        write_table(results, tmp_path / "missing" / "table.csv")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInputError, match="pyarrow"):
        write_table(results, tmp_path / "table.parquet")


def test_a_file_is_replaced_when_all_went_well_and_otherwise_left_as_it_was(tmp_path):
    path = tmp_path / "page.html"
    with writing(path) as part:
        assert part.suffix == ".html"  # some writers choose a format by it
        part.write_text("first")
    with pytest.raises(UnicodeEncodeError), writing(path) as part:
        part.write_text("half of the sec\udcff", "utf-8")
    assert path.read_text() == "first"
    with writing(path) as part:
        part.write_text("second")
    assert path.read_text() == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_folders_on_the_way_are_made_only_when_asked_for(tmp_path):
    path = tmp_path / "some" / "folder" / "page.html"
    sentence = r"^expected a file that can be written, got .*page.html .*choose another folder$"
    with pytest.raises(ResultsError, match=sentence), writing(path) as part:
        part.write_text("text")
    assert list(tmp_path.iterdir()) == []
    with writing(path, parents=True) as part:
        part.write_text("text")
    assert path.read_text() == "text"
    with pytest.raises(ResultsError, match="choose another folder"), writing(path / "below.txt", parents=True):
        pass  # a file is no folder


def test_a_folder_that_holds_something_is_refused_unless_resumed_or_forced(tmp_path):
    folder = tmp_path / "out"
    for options in ({}, {"resume": True}, {"force": True}):
        assert claim_folder(folder, "report", **options) == folder / "results.sqlite"  # new
    assert not folder.exists()
    folder.mkdir()
    check_folder(folder, "report")  # empty
    (folder / "thesis.tex").touch()
    with pytest.raises(
        BadInputError, match=r"^expected a new folder for the report, .* pass force=True \(--force\) to write into it$"
    ):
        check_folder(folder, "report")
    with pytest.raises(BadInputError, match="to resume, got a folder without it"):
        check_folder(folder, "report", resume=True)
    with pytest.raises(BadInputError, match="got both"):
        check_folder(folder, "report", resume=True, force=True)
    for options in ({}, {"force": True}):
        with pytest.raises(BadInputError, match="expected a folder for the page, got the file"):
            check_folder(folder / "thesis.tex", "page", **options)
    check_folder(folder, "report", force=True)


def test_earlier_results_are_removed_only_by_force_and_only_when_they_are_ours(tmp_path):
    results = tmp_path / "results.sqlite"
    sweep(Plan.of(sweeps.value, [{"i": 1}]), results)
    with pytest.raises(BadInputError, match=r"resume=True \(--resume\) to continue, or force=True \(--force\) to start again$"):
        claim_folder(tmp_path, "reproduction")
    assert claim_folder(tmp_path, "reproduction", resume=True) == results
    assert len(read(results)) == 1
    with Store(results, resume=True), pytest.raises(ResultsError, match="is writing; wait"):
        claim_folder(tmp_path, "reproduction", force=True)
    assert len(read(results)) == 1
    assert not claim_folder(tmp_path, "reproduction", force=True).exists()
    results.write_text("a letter, not a database, and long enough to be sure of it " * 20)
    with pytest.raises(ResultsError, match="not a database"):
        claim_folder(tmp_path, "reproduction", force=True)
    assert results.read_text().startswith("a letter")


def test_a_file_that_cannot_be_written_is_refused_beforehand(tmp_path):
    check_writable(tmp_path / "table.csv")
    check_writable(tmp_path / "not" / "yet" / "table.csv")
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "table.csv", tmp_path / ("x" * 300), tmp_path / "a\0b", Path("/proc/table.csv")):
        with pytest.raises(ResultsError, match="expected a file that can be written"):
            check_writable(path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
