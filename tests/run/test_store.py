"""The results file: what it keeps, who may write it, what it refuses."""

import json
import os
import random
import resource
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from howsmooth.errors import ResultsError
from howsmooth.run import Plan, Record, Task, read, sweep
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


def test_a_second_writer_is_told_who_the_first_is_and_every_row_stays(tmp_path):
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
    with pytest.raises(ResultsError, match="with 2 results; pass resume=True"):
        sweep(plan(2), path)
    assert len(read(path)) == 2


def test_what_a_kill_during_creation_leaves_is_taken_over(tmp_path):
    path = tmp_path / "r.sqlite"
    path.touch()
    assert sweep(plan(2), path).done == 2


def edit(path: Path, *commands: str) -> None:
    with sqlite3.connect(path) as db:
        for command in commands:
            db.execute(command)
    db.close()


def foreign(path: Path) -> None:
    edit(path, "CREATE TABLE theirs (x)")


def of_version(version: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        sweep(plan(1), path)
        edit(path, f"PRAGMA user_version={version}")

    return make


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda p: p.write_text("a letter, not a database, and long enough to be sure of it " * 20), "not a database"),
        (foreign, "another program's database"),
        (of_version(VERSION + 1), f"of version {VERSION + 1}.* or read it with the howsmooth that wrote it$"),
        (of_version(1), "of version 1; choose another name, or read it with the howsmooth that wrote it$"),
    ],
    ids=["text", "foreign", "newer", "older"],
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of two runs, with a failure and a row that was moved."""
    path = tmp_path_factory.mktemp("whole") / "r.sqlite"
    sweep(plan(30), path)
    sweep(plan(2) + Plan.of(sweeps.fussy, [{"i": 1}]) + plan(40), path, resume=True)
    return path


def damages(path: Path, bytes_: bytes, truth: list[Record]) -> str:
    """What becomes of a file with other content: `equal`, `refused`, or something that must not be."""
    path.write_bytes(bytes_)
    try:
        return "equal" if read(path) == truth else "other rows"
    except ResultsError as error:
        return "refused" if "\n" not in str(error) else "lines"


def test_a_bit_that_flips_anywhere_changes_nothing_or_is_noticed(whole: Path, tmp_path: Path):
    choose, content, truth = random.Random(0), whole.read_bytes(), read(whole)
    ended: Counter[str] = Counter()
    for i in range(300):
        flipped = bytearray(content)
        flipped[choose.randrange(100 if i < 50 else len(content))] ^= 1 << choose.randrange(8)  # the header is 100 bytes
        ended[damages(tmp_path / "r.sqlite", bytes(flipped), truth)] += 1
    assert set(ended) == {"equal", "refused"}
    assert ended["refused"] > 50


def test_a_file_that_is_cut_off_or_overwritten_is_refused(whole: Path, tmp_path: Path):
    choose, content, truth = random.Random(0), whole.read_bytes(), read(whole)
    path = tmp_path / "r.sqlite"
    for length in (1, 50, 100, 4096, 5000, len(content) // 2, len(content) - 1, len(content) - 4096):
        assert damages(path, content[:length], truth) == "refused"
    ended: Counter[str] = Counter()
    for _ in range(40):
        start = choose.randrange(len(content))
        ended[damages(path, content[:start] + choose.randbytes(400) + content[start + 400 :], truth)] += 1
        ended[damages(path, content[:start] + bytes(400) + content[start + 400 :], truth)] += 1
    assert set(ended) <= {"equal", "refused"}


@pytest.mark.parametrize(
    "command",
    [
        "DELETE FROM results WHERE position = 3",
        "DELETE FROM results",
        "DELETE FROM runs WHERE id = 1",
        "DELETE FROM tally",
        "INSERT INTO tally VALUES (1, 1)",
        "UPDATE results SET value = replace(value, '16', '17')",
        "UPDATE results SET position = 50 WHERE position = 3",
        "UPDATE results SET tries = 2 WHERE position = 3",
        "UPDATE results SET run = 2 WHERE position = 0",
        "UPDATE results SET checksum = checksum + 1 WHERE position = 3",
        "UPDATE runs SET versions = '{}'",
        "INSERT OR REPLACE INTO results SELECT 'x', 99, function, arguments, setup, status, value, reason, tries, seconds, "
        "finished, run, checksum FROM results WHERE position = 3",
        "ALTER TABLE results RENAME COLUMN value TO answer",
        "DROP TABLE runs",
    ],
)
def test_rows_that_were_changed_moved_missing_or_added_are_refused_and_not_resumed(whole: Path, tmp_path: Path, command: str):
    path = tmp_path / "r.sqlite"
    shutil.copy(whole, path)
    edit(path, command)
    for attempt in (lambda: read(path), lambda: sweep(plan(40), path, resume=True)):
        with pytest.raises(ResultsError, match=r"^expected a results file as it was written, .* restore a copy of it, or"):
            attempt()


def test_a_file_that_another_program_holds_is_said_to_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "r.sqlite"
    sweep(plan(2), path)
    monkeypatch.setattr("howsmooth.run.store._PATIENCE", 0.05)
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ResultsError, match="got a lock of another program; end that program first"):
            sweep(plan(2), path, resume=True)
        with pytest.raises(ResultsError, match="got a lock of another program; end that program first"):
            read(path)
    finally:
        db.close()
    assert len(read(path)) == 2


def test_a_reason_with_half_a_character_is_kept(tmp_path: Path):
    path, wanted = tmp_path / "r.sqlite", plan(1)
    with Store(path) as store:
        store.begin(wanted, "test", "a command \udcff", {})
        store.add(wanted.tasks[0], Outcome("failed", None, "why \ud800\0 not", 1, 0))
    assert read(path)[0].reason == "why \\ud800\0 not"
