"""The schedule with workers whose every move is written down beforehand."""

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from howsmooth.errors import WorkerError
from howsmooth.run import Plan, Task
from howsmooth.run.pool import Schedule
from howsmooth.run.store import Outcome
from problems import sweeps

Play = Callable[[int, int], str]  # worker and task number → done, failed, refused or dies


class Scripted:
    """Workers that answer at once, as the play says; those in `stillborn` die before they are ready."""

    def __init__(self, play: Play, stillborn: tuple[int, ...] = ()):
        self.play, self.stillborn = play, stillborn
        self.started, self.tried, self.stopped = 0, [], False

    def start(self) -> int:
        self.started += 1
        return self.started

    def send(self, worker: int, task: Task | None) -> Future[Outcome]:
        if task is None:
            dead = worker in self.stillborn
            return answered(Outcome("died", reason="a stillborn worker") if dead else Outcome("done"))
        number = task.kwargs()["i"]
        self.tried.append((worker, number))
        endings = {
            "done": Outcome("done", str(number), seconds=1.0),
            "failed": Outcome("failed", reason="why", seconds=1.0),
            "refused": Outcome("refused", reason="why", seconds=1.0),
            "dies": Outcome("died", reason="a dead worker"),
        }
        return answered(endings[self.play(worker, number)])

    def check(self) -> None:
        raise AssertionError("the schedule waits for workers that have nothing to do")

    def stop(self) -> None:
        self.stopped = True


def answered(outcome: Outcome) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future


def run(crew: Scripted, tasks: int = 4, count: int = 2, tries: int = 3) -> dict[int, tuple[str, int, str | None]]:
    plan = Plan.of(sweeps.value, [{"i": i} for i in range(tasks)])
    outcomes = list(Schedule(crew, plan, count, tries).run())
    assert len(outcomes) == len({task.key for task, _ in outcomes}) == tasks
    assert crew.stopped
    return {task.kwargs()["i"]: (o.status, o.tries, o.reason) for task, o in outcomes}


def test_every_task_is_done_once():
    crew = Scripted(lambda worker, task: "done")
    assert set(run(crew).values()) == {("done", 1, None)}
    assert len(crew.tried) == 4
    assert crew.started == 2


def test_every_second_worker_begins_at_the_end():
    crew = Scripted(lambda worker, task: "done")
    run(crew, tasks=6, count=2)
    assert [[task for who, task in crew.tried if who == worker] for worker in (1, 2)] == [[0, 1, 2], [5, 4, 3]]


def test_what_failed_comes_last_and_who_died_is_replaced_at_the_same_end():
    crew = Scripted(lambda worker, task: {(1, 1): "dies", (2, 5): "failed"}.get((worker, task), "done"))
    assert set(run(crew, tasks=6, count=2).values()) == {("done", 1, None), ("done", 2, None)}
    assert [task for who, task in crew.tried if who == 3][:1] == [2]
    assert sorted(task for _, task in crew.tried[-2:]) == [1, 5]


def test_no_more_workers_than_tasks_are_started():
    crew = Scripted(lambda worker, task: "done")
    run(crew, tasks=1, count=8)
    assert crew.started == 1


def test_a_failure_goes_to_another_worker_and_a_refusal_does_not():
    crew = Scripted(lambda worker, task: "failed" if (worker, task) == (1, 0) else "refused" if task == 2 else "done")
    endings = run(crew)
    assert endings[0] == ("done", 2, None)
    assert endings[2] == ("failed", 1, "why")
    assert [w for w, t in crew.tried if t == 0] == [1, 2]


def test_a_failure_that_stays_is_recorded_after_all_tries():
    assert run(Scripted(lambda worker, task: "failed" if task == 1 else "done"))[1] == ("failed", 3, "why, 3 times")


def test_one_worker_tries_again_itself():
    assert run(Scripted(lambda worker, task: "failed" if task == 1 else "done"), count=1)[1] == ("failed", 3, "why, 3 times")


def test_dead_workers_are_replaced_and_their_tasks_tried_elsewhere():
    crew = Scripted(lambda worker, task: "dies" if worker <= 2 else "done")
    assert {ending[0] for ending in run(crew).values()} == {"done"}
    assert crew.started == 4


def test_workers_that_die_while_they_start_are_replaced_for_a_while_then_done_without():
    crew = Scripted(lambda worker, task: "done", stillborn=(2, 3, 4, 5, 6, 7, 8, 9))
    assert {ending[0] for ending in run(crew, tasks=40).values()} == {"done"}
    assert crew.started <= 5


def test_a_sweep_without_any_worker_ends():
    crew = Scripted(lambda worker, task: "done", stillborn=tuple(range(100)))
    with pytest.raises(WorkerError, match="got a stillborn worker"):
        run(crew)
    assert crew.started < 10
    assert crew.stopped
