"""Who does what next: hands tasks to workers, replaces workers that die, tries tasks again elsewhere.

An engine brings the workers, local processes or Ray actors; this file alone decides.
"""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from howsmooth.errors import WorkerError
from howsmooth.run.plan import Call, Plan, Task
from howsmooth.run.store import Outcome


@final
@dataclass(frozen=True)
class Event:
    """Something a worker did.

    answer: its message, as `worker.Worker` words them; None when the worker is gone.  reason: how it went.
    """

    worker: int
    answer: dict[str, Any] | None
    reason: str = ""


class Crew(Protocol):
    """Workers of one kind, numbered as they are started."""

    def start(self) -> int:
        """Begin a new worker; it prepares itself and then says `ready`."""
        ...

    def send(self, worker: int, call: Call) -> None:
        """Give an idle worker something to do; if it is gone, an event will say so."""
        ...

    def wait(self) -> list[Event]:
        """What has happened, at least one event."""
        ...

    def stop(self) -> None:
        """End every worker."""
        ...


class Engine(Protocol):
    """A way to run tasks."""

    @property
    def name(self) -> str: ...

    def run(self, plan: Plan, tasks: Sequence[Task]) -> Generator[Outcome, None, None]:
        """The outcomes in the order they arrive; closing the iterator ends the workers."""
        ...


@dataclass
class _Attempt:
    task: Task
    tries: int = 0
    seconds: float = 0.0
    avoid: set[int] = field(default_factory=set)


def schedule(crew: Crew, tasks: Sequence[Task], count: int, tries: int) -> Generator[Outcome, None, None]:
    """Run tasks on `count` workers.

    A task whose worker dies or that raises is tried again on another worker, `tries` times in all; a refusal of ours
    (`HowSmoothError`) is final at once. A worker that cannot be prepared ends the sweep with its reason; where workers die
    again and again before their first task, the others go on without them.
    """
    waiting = deque(_Attempt(task) for task in tasks)
    left = len(waiting)
    starting = {crew.start() for _ in range(min(count, left))}
    busy: dict[int, _Attempt] = {}
    idle: set[int] = set()
    stillborn = 0
    while left:
        for event in crew.wait():
            worker, answer = event.worker, event.answer
            if answer is None and worker in busy:
                failed = {"event": "failed", "reason": event.reason, "value": None, "refused": False, "seconds": 0.0}
                outcome = _judge(busy.pop(worker), worker, failed, tries, waiting)
                starting.add(crew.start())
            elif answer is None:
                starting.discard(worker)
                idle.discard(worker)
                stillborn += 1
                if stillborn < tries:
                    starting.add(crew.start())
                elif not (starting or idle or busy):
                    raise WorkerError(f"expected workers that start, got {event.reason} {stillborn} times; try fewer workers")
                continue
            elif worker in starting:
                starting.discard(worker)
                if answer["event"] != "ready":
                    raise WorkerError(
                        answer["reason"] if answer["refused"] else f"the workers cannot start: {answer['reason']}"
                    )
                stillborn = 0
                idle.add(worker)
                continue
            else:
                outcome = _judge(busy.pop(worker), worker, answer, tries, waiting)
                idle.add(worker)
            if outcome is not None:
                left -= 1
                yield outcome
        _assign(crew, waiting, idle, busy, starting)


def _judge(attempt: _Attempt, worker: int, answer: dict[str, Any], tries: int, waiting: deque[_Attempt]) -> Outcome | None:
    """The outcome of an attempt, or None and back into the queue."""
    attempt.tries += 1
    attempt.seconds += answer["seconds"]
    if answer["event"] == "failed" and not answer["refused"] and attempt.tries < tries:
        attempt.avoid.add(worker)
        waiting.append(attempt)
        return None
    again = "" if attempt.tries == 1 or answer["event"] == "done" else f", {attempt.tries} times"
    reason = None if answer["reason"] is None else answer["reason"] + again
    state = "done" if answer["event"] == "done" else "failed"
    return Outcome(attempt.task, state, answer["value"], reason, attempt.tries, attempt.seconds)


def _assign(crew: Crew, waiting: deque[_Attempt], idle: set[int], busy: dict[int, _Attempt], starting: set[int]) -> None:
    """Idle workers take the first waiting task they have not failed at; any task, when there is nobody else to try it."""
    for worker in sorted(idle):
        everyone = idle | set(busy) | starting
        for attempt in waiting:
            if worker not in attempt.avoid or everyone <= attempt.avoid:
                break
        else:
            continue
        waiting.remove(attempt)
        idle.discard(worker)
        busy[worker] = attempt
        crew.send(worker, attempt.task.call)
