"""Who does what: workers, a schedule that replaces those that die and tries tasks again elsewhere, and local processes.

`Local` works in this process or in fresh interpreters that share nothing with it; everything that passes between them is
plain, so a script that sweeps needs no `__main__` guard. `howsmooth.run.ray` brings workers on a cluster.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Generator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol, final

from howsmooth.errors import BadInputError, HowSmoothError, WorkerError
from howsmooth.run.plan import Plan, Task
from howsmooth.run.store import Outcome

QUIET = 10.0  # seconds without an outcome after which a crew is asked whether it is there
Outcomes = Generator[tuple[Task, Outcome], None, None]


class Engine(Protocol):
    """A way to run tasks."""

    @property
    def name(self) -> str: ...

    def run(self, plan: Plan, context: Any = None) -> Outcomes:
        """The outcomes in the order they arrive; closing the iterator ends the workers.

        context: what the plan's setup returns, where this process has it already; workers elsewhere build their own.
        """
        ...


@final
@dataclass(frozen=True)
class Local:
    """Tasks on this machine.

    Attributes:
        workers: Processes; one works in this process, where a task is tried once.
        tries: Attempts at a task before it counts as failed.
        threads: For each worker; by default the machine's cores are shared out, unless OMP_NUM_THREADS says otherwise.
    """

    workers: int = 1
    tries: int = 3
    threads: int | None = None

    def __post_init__(self):
        check_counts(workers=self.workers, tries=self.tries, threads=1 if self.threads is None else self.threads)

    @property
    def name(self) -> str:
        return f"local, {self.workers} worker{'s' * (self.workers > 1)}"

    def run(self, plan: Plan, context: Any = None) -> Outcomes:
        if self.workers == 1:
            return _here(plan, context)
        threads = None if "OMP_NUM_THREADS" in os.environ else max(1, cores() // self.workers)
        crew = _LocalCrew(plan.setup, self.threads or threads, self.workers)
        return Schedule(crew, plan, self.workers, self.tries).run()


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def check_counts(**counts: int) -> None:
    """Refuse what is not a whole number of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise BadInputError(f"expected {name} of at least 1, got {value!r}; give a whole number")


@final
class Worker:
    """What any engine's worker does: prepare once, then one task after another. Errors become outcomes, never escape."""

    def __init__(self, setup: Task | None, context: Any = None):
        self._setup, self._context = setup, context

    def answer(self, task: Task | None) -> Outcome:
        """The outcome of a task; of the preparation without one, which builds the context unless it was given."""
        started = time.perf_counter()
        try:
            outcome = Outcome("done", json.dumps(self._call(task)))
        except HowSmoothError as error:
            outcome = Outcome("refused", reason=str(error))
        except Exception as error:  # in one line: its type, text and place
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:2000]
            outcome = Outcome("failed", reason=f"{text} ({os.path.basename(frame.filename)}:{frame.lineno})")
        return replace(outcome, seconds=time.perf_counter() - started)

    def _call(self, task: Task | None) -> Any:
        if task is not None:
            return task.call() if self._setup is None else task.call(self._context)
        if self._setup is not None and self._context is None:
            self._context = self._setup.call()
        return None


def _check_ready(prepared: Outcome) -> None:
    if prepared.ending != "done":
        raise WorkerError(prepared.reason if prepared.ending == "refused" else f"the workers cannot start: {prepared.reason}")


def _here(plan: Plan, context: Any) -> Outcomes:
    """In this process: no other worker to try on, so a task is tried once."""
    worker = Worker(plan.setup, context)
    if plan.tasks:
        _check_ready(worker.answer(None))
    for task in plan.tasks:
        yield task, worker.answer(task)


class Crew(Protocol):
    """Workers of one kind; the schedule knows them by what `start` returns."""

    def start(self) -> Any:
        """Begin a new worker."""

    def send(self, worker: Any, task: Task | None) -> "Future[Outcome]":
        """Give an idle worker something to do, its preparation first. The outcome of a worker that is gone is `died`."""
        ...

    def check(self) -> None:
        """Raise if nothing will be heard of any worker again; called where nothing was for `QUIET` seconds."""

    def stop(self) -> None:
        """End every worker."""


@dataclass(eq=False)
class _Attempts:
    """What has become of a task so far."""

    task: Task
    tries: int = 0
    seconds: float = 0.0
    failed_on: set[Any] = field(default_factory=set)

    def add(self, worker: Any, outcome: Outcome) -> Outcome:
        """Count one more; the outcome as it would be recorded."""
        self.tries += 1
        self.seconds += outcome.seconds
        self.failed_on.add(worker)
        again = f", {self.tries} times" if self.tries > 1 else ""
        return replace(outcome, reason=outcome.reason and outcome.reason + again, tries=self.tries, seconds=self.seconds)


@final
class Schedule:
    """Tasks handed out to `count` workers.

    Every second worker begins at the end of the plan, so that work of different kinds goes on side by side, and each worker
    finds tasks together that share something. A task whose worker dies or that raises is tried again on another worker,
    `tries` times in all; a refusal of ours (`HowSmoothError`) is final at once. A worker that cannot be prepared ends the
    sweep with its reason; where workers die again and again before their first task, the others go on without them.
    """

    def __init__(self, crew: Crew, plan: Plan, count: int, tries: int):
        self._crew, self._count, self._tries, self._stillborn = crew, count, tries, 0
        self._new = deque(_Attempts(task) for task in plan.tasks)
        self._again: list[_Attempts] = []  # tried before; they come last
        self._workers: dict[Any, bool] = {}  # those that live, and whether they begin at the end
        self._busy: dict[Future[Outcome], tuple[Any, _Attempts | None]] = {}

    def run(self) -> Outcomes:
        """The outcomes in the order they arrive; the workers end with it."""
        left = len(self._new)
        try:
            for k in range(min(self._count, left)):
                self._start(k % 2 == 1)
            while left:
                worker, attempts, outcome = self._heard()
                self._look_after(worker, attempts is None, outcome)
                if attempts is not None:
                    outcome = attempts.add(worker, outcome)
                    if outcome.ending in ("failed", "died") and attempts.tries < self._tries:
                        self._again.append(attempts)
                    else:
                        left -= 1
                        yield attempts.task, outcome
                self._hand_out()
        finally:
            self._crew.stop()

    def _start(self, from_end: bool) -> None:
        worker = self._crew.start()
        self._workers[worker] = from_end
        self._busy[self._crew.send(worker, None)] = worker, None

    def _heard(self) -> tuple[Any, _Attempts | None, Outcome]:
        """The next outcome, of a task or else of a worker's preparation."""
        while not (done := wait(self._busy, QUIET, FIRST_COMPLETED).done):
            self._crew.check()
        first = next(future for future in self._busy if future in done)
        return (*self._busy.pop(first), first.result())

    def _look_after(self, worker: Any, preparing: bool, outcome: Outcome) -> None:
        """Replace a worker that died; refuse to go on with one that cannot be prepared, or with none."""
        if outcome.ending == "died":
            from_end = self._workers.pop(worker)
            self._stillborn += preparing
            if not preparing or self._stillborn < self._tries:
                self._start(from_end)
            elif not self._workers:
                reason = f"{outcome.reason} {self._stillborn} times"
                raise WorkerError(f"expected workers that start, got {reason}; try fewer workers")
        elif preparing:
            _check_ready(outcome)
            self._stillborn = 0

    def _hand_out(self) -> None:
        busy = {worker for worker, _ in self._busy.values()}
        for worker in [w for w in self._workers if w not in busy]:
            attempts = self._next_for(worker)
            if attempts is not None:
                self._busy[self._crew.send(worker, attempts.task)] = worker, attempts

    def _next_for(self, worker: Any) -> _Attempts | None:
        """A new task; else of those tried before one that the worker has not failed at, or any when nobody else is there."""
        if self._new:
            return self._new.pop() if self._workers[worker] else self._new.popleft()
        fits = (a for a in self._again if worker not in a.failed_on or self._workers.keys() <= a.failed_on)
        attempts = next(fits, None)
        if attempts is not None:
            self._again.remove(attempts)
        return attempts


def surroundings(threads: int | None) -> dict[str, str]:
    """Variables of a worker's environment: a task's module must be found there as here, and waiting must not cost."""
    own = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    own["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")  # workers that spin slow each other down
    return own if threads is None else own | {"OMP_NUM_THREADS": str(threads)}


@final
class _Process:
    """An interpreter with a pipe to it."""

    def __init__(self, setup: Task | None, environment: Mapping[str, str]):
        self._pipe, theirs = Pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the worker goes)
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from howsmooth.run.pool import serve; serve({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                env=environment,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the parent, which decides when to stop
            )
        with contextlib.suppress(OSError):  # it has died; its first answer will say so
            self._pipe.send(setup)

    def answer(self, task: Task | None) -> Outcome:
        """What its `Worker` answers; blocks until then."""
        try:
            self._pipe.send(task)
            return self._pipe.recv()
        except (EOFError, OSError):
            code = self._child.wait()
            self._errors.seek(0)
            said = self._errors.read()[-4000:].decode("utf-8", "replace").strip().splitlines()
            self.close()
            ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Outcome("died", reason=f"a worker process that died ({ended}{': ' + said[-1][:300] if said else ''})")

    def kill(self) -> None:
        """End it with all that it started."""
        if self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)

    def close(self) -> None:
        self._child.wait()
        self._errors.close()
        self._pipe.close()


@final
class _LocalCrew:
    """A crew of interpreters, and a thread for each that waits for its answers."""

    def __init__(self, setup: Task | None, threads: int | None, count: int):
        self._setup, self._environment = setup, os.environ | surroundings(threads)
        self._waiting = ThreadPoolExecutor(count)
        self._processes: list[_Process] = []

    def start(self) -> _Process:
        self._processes.append(_Process(self._setup, self._environment))
        return self._processes[-1]

    def send(self, worker: _Process, task: Task | None) -> "Future[Outcome]":
        return self._waiting.submit(worker.answer, task)

    def check(self) -> None:
        """Nothing to be done: the end of a process is heard at once."""

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        self._waiting.shutdown()
        for process in self._processes:
            process.close()


def serve(descriptor: int) -> None:
    """What a worker process runs: its setup comes first, then what it is to answer."""
    pipe, inbox = Connection(descriptor), SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, inbox), daemon=True).start()
    worker = Worker(inbox.get())
    while True:
        pipe.send(worker.answer(inbox.get()))


def _listen(pipe: Connection, inbox: "SimpleQueue[Task | None]") -> None:
    """Pass tasks on; the end of the pipe is the end of the parent, so of this process, whatever it is doing."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(pipe.recv())
    os._exit(0)
