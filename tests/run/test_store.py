"""The results file: what it keeps, who may write it, what it refuses."""

import json
import os
import resource
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from howsmooth.errors import ResultsError
from howsmooth.run import Plan, Task, read, sweep
from howsmooth.run.store import VERSION, Outcome, Status, Store
from problems import sweeps


def plan(count: int) -> Plan:
    return Plan.of(sweeps.value, [{"i": i} for i in range(count)])


def outcome(task: Task, status: Status = "done", value: Any = None) -> tuple[Task, Outcome]:
    return task, Outcome(status, json.dumps(value), None if status == "done" else "why", 1, 0.5)


def begin(store: Store, wanted: Plan) -> dict:
    return store.begin(wanted, "test", "a command", {"python": "3"})


def test_rows_come_back_in_the_order_of_the_plan_whatever_order_they_arrived_in(tmp_path):
    path, wanted = tmp_path / "r.sqlite", plan(5)
    with Store(path) as store:
        assert begin(store, wanted) == {}
        for i in (3, 0, 4, 1):
            store.add(*outcome(wanted.tasks[i], value={"v": i}))
    rows = read(path)
    assert [r.value["v"] for r in rows] == [0, 1, 3, 4]
    assert rows[0].arguments == {"i": 0}
    assert rows[0].versions == {"python": "3"}
    with Store(path, resume=True) as store:
        longer = Plan(tuple(reversed(plan(7).tasks)))
        assert set(begin(store, longer)) == {wanted.tasks[i].key for i in (0, 1, 3, 4)}
    assert [r.value["v"] for r in read(path)] == [4, 3, 1, 0]


def test_each_row_is_there_as_soon_as_it_is_added_and_the_file_is_alone_afterwards(tmp_path):
    path, wanted = tmp_path / "r.sqlite", plan(3)
    with Store(path) as store:
        begin(store, wanted)
        for i, task in enumerate(wanted.tasks):
            store.add(*outcome(task))
            assert len(read(path)) == i + 1
    assert [p.name for p in tmp_path.iterdir()] == ["r.sqlite"]


def test_a_later_outcome_takes_the_place_of_a_failure(tmp_path):
    path, wanted = tmp_path / "r.sqlite", plan(1)
    with Store(path) as store:
        begin(store, wanted)
        store.add(*outcome(wanted.tasks[0], "failed"))
        assert read(path)[0].reason == "why"
        store.add(*outcome(wanted.tasks[0], value=7))
    assert [(r.status, r.value, r.reason) for r in read(path)] == [("done", 7, None)]


def test_a_second_writer_is_told_who_the_first_is_and_nothing_is_lost(tmp_path):
    path, wanted = tmp_path / "r.sqlite", plan(2)
    with Store(path) as store:
        begin(store, wanted)
        store.add(*outcome(wanted.tasks[0]))
        with pytest.raises(ResultsError, match=f"process {os.getpid()} is writing"):
            Store(path, resume=True)
        store.add(*outcome(wanted.tasks[1]))
    assert len(read(path)) == 2
    Store(path, resume=True).close()


def test_a_lock_file_that_nobody_holds_is_no_obstacle(tmp_path):
    path = tmp_path / "r.sqlite"
    path.with_name("r.sqlite.lock").write_text("999999\n")
    Store(path).close()
    assert [p.name for p in tmp_path.iterdir()] == ["r.sqlite"]


def test_a_file_with_results_is_not_taken_for_a_new_one(tmp_path):
    path = tmp_path / "r.sqlite"
    sweep(plan(2), path)
    with pytest.raises(ResultsError, match="with 2 results; resume it"):
        sweep(plan(2), path)
    assert len(read(path)) == 2


def test_what_a_kill_during_creation_leaves_is_taken_over(tmp_path):
    path = tmp_path / "r.sqlite"
    path.touch()
    assert sweep(plan(2), path).done == 2


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()


def newer(path: Path) -> None:
    sweep(plan(1), path)
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version={VERSION + 1}")
    db.close()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda p: p.write_text("a letter, not a database, and long enough to be sure of it " * 20), "not a database"),
        (foreign, "another program's database"),
        (newer, f"of version {VERSION + 1}"),
    ],
    ids=["text", "foreign", "newer"],
)
def test_other_files_are_refused_in_one_sentence_and_left_alone(tmp_path, make, match):
    path = tmp_path / "r.sqlite"
    make(path)
    before = path.read_bytes()
    for attempt in (lambda: Store(path, resume=True), lambda: read(path)):
        with pytest.raises(ResultsError, match=match) as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.sqlite"]


@pytest.mark.parametrize("path", ["/dev/null/folder/r.sqlite", "/proc/r.sqlite"])
def test_a_folder_that_cannot_be_written_is_reported_before_any_work(path, tmp_path):
    marked = Plan.of(sweeps.shifted, [{"i": 0}], setup=sweeps.build, setup_arguments={"base": 0, "folder": str(tmp_path)})
    with pytest.raises(ResultsError, match="choose another folder"):
        sweep(marked, path)
    assert list(tmp_path.iterdir()) == []


def test_missing_files_are_not_created_by_reading(tmp_path):
    with pytest.raises(ResultsError, match="not there"):
        read(tmp_path / "r.sqlite")
    assert list(tmp_path.iterdir()) == []


def limited(path: Path, kilobytes: int, count: int) -> None:
    """A sweep whose files may not grow past a size, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, hard))
    try:
        sweep(plan(count), path, resume=path.exists())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_is_reported_before_work_or_at_a_row_and_what_was_done_is_kept(tmp_path):
    path = tmp_path / "r.sqlite"
    with pytest.raises(ResultsError, match="make room"):
        limited(path, 8, 500)
    with pytest.raises(ResultsError, match="make room"):
        limited(path, 100, 500)
    kept = read(path)
    assert 0 < len(kept) < 500
    ended = sweep(plan(500), path, resume=True)
    assert (ended.done, ended.skipped) == (500, len(kept))
    assert [r.value["square"] for r in read(path)] == [i * i for i in range(500)]


def test_a_copy_can_be_read_where_nothing_can_be_written(tmp_path):
    path = tmp_path / "r.sqlite"
    sweep(plan(3), path)
    shutil.copy(path, tmp_path / "copy.sqlite")
    (tmp_path / "copy.sqlite").chmod(0o444)
    assert len(read(tmp_path / "copy.sqlite")) == 3
