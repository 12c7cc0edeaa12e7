"""Sweeps: interrupted, resumed, on workers that die."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from howsmooth.errors import BadInputError, ResultsError, WorkerError
from howsmooth.run import Local, Plan, Record, read, sweep
from problems import sweeps
from problems.sweeps import same

TASKS = 200
PAUSE = 0.01
KILLS = ((1, 0, 1.0), (2, 60, PAUSE), (1, 60, PAUSE))  # workers; at most how many more rows, and seconds, until the kill

SCRIPT = f"""
import sys
from problems import sweeps
from problems.sweeps import same
from howsmooth.run import Local, Plan, sweep
plan = Plan.of(sweeps.value, [{{"i": i}} for i in range({TASKS})])
sweep(plan, sys.argv[1], engine=Local(workers=int(sys.argv[2])), resume=True)
"""


def plan(count: int = 20) -> Plan:
    return Plan.of(sweeps.value, [{"i": i} for i in range(count)])


def start(path: Path, workers: int) -> "subprocess.Popen[bytes]":
    """The sweep of `plan(TASKS)` in processes of its own, which take their time."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PAUSE": str(PAUSE)}
    command = [sys.executable, "-c", SCRIPT, str(path), str(workers)]
    return subprocess.Popen(command, env=environment, process_group=0, stderr=subprocess.DEVNULL)


def count(path: Path) -> int:
    try:
        return len(read(path))
    except ResultsError:  # not there yet
        return 0


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_comparison_sees_a_wrong_row_a_missing_one_and_one_too_many(tmp_path):
    sweep(plan(4), tmp_path / "a.sqlite")
    sweep(plan(5), tmp_path / "b.sqlite")
    sweep(Plan.of(sweeps.value, [{"i": i} for i in (0, 1, 2, 9)]), tmp_path / "c.sqlite")
    rows = [read(tmp_path / f"{name}.sqlite") for name in "abc"]
    assert same(rows[0], rows[0])
    assert not same(rows[0], rows[1])
    assert not same(rows[0], rows[2])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks up worker processes under /proc")
@pytest.mark.parametrize("kills", [KILLS[1:2], pytest.param(KILLS, marks=pytest.mark.weekly)], ids=["once", "three times"])
def test_a_sweep_killed_at_random_moments_ends_with_the_rows_of_one_that_was_not(tmp_path, kills):
    whole, broken = tmp_path / "whole.sqlite", tmp_path / "broken.sqlite"
    sweep(plan(TASKS), whole)
    choose = random.Random(time.time_ns())
    counts, orphans = [], []
    for workers, more, delay in kills:
        wanted = count(broken) + choose.randint(more > 0, more)
        process = start(broken, workers)
        while count(broken) < wanted and process.poll() is None:
            time.sleep(0.002)
        time.sleep(choose.uniform(0, delay))
        orphans += children(process.pid)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        counts.append(count(broken))
    assert counts == sorted(counts)
    assert 0 < counts[-1] < TASKS
    assert len(kills) == 1 or 0 < counts[1] < counts[-1]
    sweep(plan(TASKS), broken, resume=True)
    assert same(read(broken), read(whole))
    assert len(orphans) == 2
    assert all(sweeps.gone(pid) for pid in orphans)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks up worker processes under /proc")
def test_ctrl_c_ends_the_workers_and_leaves_a_file_to_resume(tmp_path):
    path = tmp_path / "r.sqlite"
    process = start(path, 2)
    while not count(path) and process.poll() is None:
        time.sleep(0.002)
    workers = children(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of its foreground
    assert process.wait() not in (0, -signal.SIGKILL)
    assert len(workers) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert [p.name for p in tmp_path.iterdir()] == ["r.sqlite"]
    kept = count(path)
    assert 0 < kept < TASKS
    ended = sweep(plan(TASKS), path, resume=True)
    assert (ended.done, ended.skipped) == (TASKS, kept)
    assert [r.value["square"] for r in read(path)] == [i * i for i in range(TASKS)]


def test_an_interrupted_task_in_this_process_leaves_a_file_to_resume(tmp_path):
    path = tmp_path / "r.sqlite"
    wanted = Plan.of(sweeps.interrupted, [{"i": i, "folder": str(tmp_path)} for i in range(6)])
    with pytest.raises(KeyboardInterrupt):
        sweep(wanted, path)
    assert [r.value["i"] for r in read(path)] == [0, 1, 2]
    assert {p.name for p in tmp_path.iterdir()} == {"r.sqlite", "interrupted"}
    ended = sweep(wanted, path, resume=True)
    assert (ended.done, ended.failed, ended.skipped) == (6, 0, 3)


@pytest.mark.slow
def test_of_two_processes_on_one_file_one_is_told_and_the_other_loses_nothing(tmp_path):
    path = tmp_path / "r.sqlite"
    first = start(path, 1)
    while not count(path) and first.poll() is None:
        time.sleep(0.002)
    with pytest.raises(ResultsError, match=f"process {first.pid} is writing"):
        sweep(plan(TASKS), path, resume=True)
    assert first.wait() == 0
    assert [r.value["square"] for r in read(path)] == [i * i for i in range(TASKS)]


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory) -> list[Record]:
    path = tmp_path_factory.mktemp("one") / "r.sqlite"
    sweep(Plan.of(sweeps.fussy, [{"i": i} for i in range(20)]), path)
    return read(path)


def test_failures_are_recorded_with_their_reason_and_do_not_stop_the_rest(one_worker):
    assert [r.status for r in one_worker] == ["done", "failed", "failed", "failed", "done"] * 4
    assert one_worker[1].reason == "expected an i that is not 1, got 1; take another"
    assert one_worker[2].reason is not None
    assert one_worker[2].reason.startswith("ZeroDivisionError: a line and another (sweeps.py:")
    assert one_worker[3].reason is not None
    assert "not JSON serializable" in one_worker[3].reason


def test_what_threads_print_while_a_sweep_runs_goes_to_standard_error_and_afterwards_does_not(tmp_path, capsys):
    """Ray's own threads print, say."""
    sweep(Plan.of(sweeps.threaded, [{"text": "theirs"}]), tmp_path / "r.sqlite")
    print("ours")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("ours\n", "theirs\n")


@pytest.mark.slow
def test_processes_give_the_rows_that_one_gives_and_keep_off_standard_output(one_worker, tmp_path, capfd):
    path = tmp_path / "r.sqlite"
    ended = sweep(Plan.of(sweeps.fussy, [{"i": i} for i in range(20)]), path, engine=Local(workers=2))
    rows = read(path)
    assert (ended.done, ended.failed) == (8, 12)
    assert [(r.key, r.status) for r in rows] == [(r.key, r.status) for r in one_worker]
    assert repr([r.value for r in rows]) == repr([r.value for r in one_worker])  # nan ≠ nan
    assert {r.tries for r in rows if r.status == "failed"} == {1, 3}  # refusals once, other errors three times
    sweep(Plan.of(sweeps.fussy, [{"i": 0}]), tmp_path / "here.sqlite")
    assert capfd.readouterr().out == ""  # though the tasks print


def test_failures_are_tried_again_on_resume_and_what_is_done_is_not(tmp_path):
    path = tmp_path / "r.sqlite"
    moody = Plan.of(sweeps.moody, [{"i": i, "folder": str(tmp_path), "times": i} for i in range(3)])
    ends = [sweep(moody, path, resume=True) for _ in range(3)]
    assert [(e.done, e.failed, e.skipped) for e in ends] == [(1, 2, 0), (2, 1, 1), (3, 0, 2)]
    tried = [len((tmp_path / f"moody-{i}").read_text().splitlines()) for i in range(3)]
    assert tried == [1, 2, 3]


@pytest.mark.slow
def test_tasks_that_kill_their_worker_are_tried_on_another_and_then_given_up(tmp_path):
    arguments = [{"i": i, "folder": str(tmp_path), "times": times} for i, times in enumerate((0, 1, 0, 9, 0))]
    ended = sweep(Plan.of(sweeps.die, arguments), tmp_path / "r.sqlite", engine=Local(workers=2, tries=2))
    rows = read(tmp_path / "r.sqlite")
    assert (ended.done, ended.failed) == (4, 1)
    assert [(r.status, r.tries) for r in rows] == [("done", 1), ("done", 2), ("done", 1), ("failed", 2), ("done", 1)]
    assert rows[3].reason == "a worker process that died (SIGKILL), 2 times"


@pytest.mark.slow
def test_the_state_is_built_once_a_worker_and_the_cores_are_shared_out(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("howsmooth.run.pool.cores", lambda: 6)
    arguments = {"base": 100, "folder": str(tmp_path)}
    wanted = Plan.of(sweeps.shifted, [{"i": i} for i in range(30)], setup=sweeps.build, setup_arguments=arguments)
    sweep(wanted, tmp_path / "r.sqlite", engine=Local(workers=2))
    assert [r.value["shifted"] for r in read(tmp_path / "r.sqlite")] == list(range(100, 130))
    built = [p.read_text() for p in tmp_path.glob("built-*")]
    assert 1 <= len(built) <= 2
    assert set(built) == {"3"}


@pytest.mark.slow
def test_this_process_uses_the_context_it_is_given_and_other_processes_build_their_own(tmp_path):
    arguments = {"base": 100, "folder": str(tmp_path)}
    wanted = Plan.of(sweeps.shifted, [{"i": i} for i in range(4)], setup=sweeps.build, setup_arguments=arguments)
    context = sweeps.build(base=100)
    sweep(wanted, tmp_path / "given.sqlite", context=context)
    assert list(tmp_path.glob("built-*")) == []
    sweep(wanted, tmp_path / "built.sqlite")
    assert len(list(tmp_path.glob("built-*"))) == 1
    sweep(wanted, tmp_path / "two.sqlite", engine=Local(workers=2), context=context)
    assert len(list(tmp_path.glob("built-*"))) > 1
    for name in ("built", "two"):
        assert same(read(tmp_path / "given.sqlite"), read(tmp_path / f"{name}.sqlite"))
    with pytest.raises(BadInputError, match="a plan with a setup"):
        sweep(plan(2), tmp_path / "none.sqlite", context=context)
    assert not (tmp_path / "none.sqlite").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "setup", "match"),
    [
        (1, sweeps.refuse_to_build, "expected a model, got none"),
        (1, sweeps.break_to_build, "cannot start: RuntimeError: no weights"),
        (2, sweeps.refuse_to_build, "expected a model, got none"),
    ],
)
def test_workers_that_cannot_be_prepared_end_the_sweep(tmp_path, workers, setup, match):
    wanted = Plan.of(sweeps.shifted, [{"i": 0}, {"i": 1}], setup=setup)
    with pytest.raises(WorkerError, match=match):
        sweep(wanted, tmp_path / "r.sqlite", engine=Local(workers=workers))
    assert read(tmp_path / "r.sqlite") == []


@pytest.mark.slow
def test_workers_that_die_while_they_start_end_the_sweep(tmp_path):
    wanted = Plan.of(sweeps.shifted, [{"i": 0}, {"i": 1}], setup=sweeps.die_to_build)
    with pytest.raises(WorkerError, match=r"expected workers that start, got a worker process that died \(exit code 3"):
        sweep(wanted, tmp_path / "r.sqlite", engine=Local(workers=2, tries=1))


def test_an_empty_plan_is_done(tmp_path):
    for workers in (1, 2):
        assert sweep(Plan(()), tmp_path / "r.sqlite", engine=Local(workers=workers)).done == 0


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 1.5}, {"tries": 0}, {"threads": 0}])
def test_bad_options_are_refused(options):
    with pytest.raises(BadInputError, match="at least 1"):
        Local(**options)
