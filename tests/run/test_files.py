"""Results as tables."""

import json

import pandas
import pytest

from howsmooth.errors import BadInputError, ResultsError
from howsmooth.run import Plan, sweep, to_frame, write_table
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
    found = pandas.read_csv(out) if ending == "csv" else pandas.read_parquet(out)
    pandas.testing.assert_frame_equal(found, to_frame(results), check_dtype=False)
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
