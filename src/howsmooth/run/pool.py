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
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import IO, Any, Protocol, final

from howsmooth.errors import BadInputError, HowSmoothError, WorkerError
from howsmooth.run.plan import Plan, Task
from howsmooth.run.store import Outcome

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

    workers: processes; one works in this process, where a task is tried once.  tries: attempts at a task before it counts as
    failed.  threads: for each worker; by default the machine's cores are shared out, unless OMP_NUM_THREADS says otherwise.
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
        return schedule(_Processes(plan.setup, self.threads or threads), plan, self.workers, self.tries)


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

    def prepare(self) -> Outcome:
        """Build the context, unless there is none to build or it was given."""
        return _outcome(self._build)

    def perform(self, task: Task) -> Outcome:
        return _outcome(lambda: task.call() if self._setup is None else task.call(self._context))

    def _build(self) -> None:
        if self._setup is not None and self._context is None:
            self._context = self._setup.call()


def _outcome(call: Callable[[], Any]) -> Outcome:
    started = time.perf_counter()
    try:
        outcome = Outcome("done", json.dumps(call()))
    except HowSmoothError as error:
        outcome = Outcome("refused", reason=str(error))
    except Exception as error:  # in one line: its type, text and place
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:2000]
        outcome = Outcome("failed", reason=f"{text} ({os.path.basename(frame.filename)}:{frame.lineno})")
    return replace(outcome, seconds=time.perf_counter() - started)


def _check_ready(prepared: Outcome) -> None:
    if prepared.ending != "done":
        raise WorkerError(prepared.reason if prepared.ending == "refused" else f"the workers cannot start: {prepared.reason}")


def _here(plan: Plan, context: Any) -> Outcomes:
    """In this process: no other worker to try on, so a task is tried once."""
    worker = Worker(plan.setup, context)
    for i, task in enumerate(plan.tasks):
        with contextlib.redirect_stdout(sys.stderr):  # as in a worker process: standard output is the command's own
            if i == 0:
                _check_ready(worker.prepare())
            outcome = worker.perform(task)
        yield task, outcome


class Crew(Protocol):
    """Workers of one kind; the schedule knows them only by what `start` returns."""

    def start(self) -> Any:
        """Begin a new worker; the first outcome that comes from it is that of its preparation."""
        ...

    def send(self, worker: Any, task: Task) -> None:
        """Give an idle worker something to do; if it is gone, an outcome will say so."""
        ...

    def wait(self) -> list[tuple[Any, Outcome]]:
        """What has happened, at least one outcome and the worker it comes from; `died` where the worker is gone."""
        ...

    def stop(self) -> None:
        """End every worker."""
        ...


@dataclass(eq=False)
class _Attempts:
    """What has become of a task so far."""

    task: Task
    tries: int = 0
    seconds: float = 0.0
    failed_on: set[Any] = field(default_factory=set)


def schedule(crew: Crew, plan: Plan, count: int, tries: int) -> Outcomes:
    """Run tasks on `count` workers.

    Every second worker begins at the end of the plan, so that work of different kinds goes on side by side, and each worker
    finds tasks together that share something. A task whose worker dies or that raises is tried again on another worker,
    `tries` times in all; a refusal of ours (`HowSmoothError`) is final at once. A worker that cannot be prepared ends the
    sweep with its reason; where workers die again and again before their first task, the others go on without them.
    """
    waiting = deque(_Attempts(task) for task in plan.tasks)
    later: deque[_Attempts] = deque()  # tried before; they come last
    left, stillborn = len(waiting), 0
    ready: dict[Any, bool] = {}  # whether a living worker is prepared
    busy: dict[Any, _Attempts] = {}
    backwards: set[Any] = set()

    def start(from_end: bool) -> None:
        worker = crew.start()
        if from_end:
            backwards.add(worker)
        ready[worker] = False

    def next_for(worker: Any) -> _Attempts | None:
        """A new task; else of those tried before one that the worker has not failed at, or any when nobody else is there."""
        if waiting:
            return waiting.pop() if worker in backwards else waiting.popleft()
        found = next((a for a in later if worker not in a.failed_on or ready.keys() <= a.failed_on), None)
        if found is not None:
            later.remove(found)
        return found

    try:
        for k in range(min(count, left)):
            start(k % 2 == 1)
        while left:
            for worker, outcome in crew.wait():
                attempts = busy.pop(worker, None)
                if outcome.ending == "died":
                    del ready[worker]
                    stillborn += attempts is None
                    if attempts is not None or stillborn < tries:
                        start(worker in backwards)
                    elif not ready:
                        raise WorkerError(
                            f"expected workers that start, got {outcome.reason} {stillborn} times; try fewer workers"
                        )
                elif attempts is None:
                    _check_ready(outcome)
                    ready[worker], stillborn = True, 0
                if attempts is None:
                    continue
                attempts.tries += 1
                attempts.seconds += outcome.seconds
                if outcome.ending in ("failed", "died") and attempts.tries < tries:
                    attempts.failed_on.add(worker)
                    later.append(attempts)
                    continue
                left -= 1
                again = f", {attempts.tries} times" if attempts.tries > 1 else ""
                reason = outcome.reason and outcome.reason + again
                yield attempts.task, replace(outcome, reason=reason, tries=attempts.tries, seconds=attempts.seconds)
            for worker in [w for w, prepared in ready.items() if prepared and w not in busy]:
                attempts = next_for(worker)
                if attempts is not None:
                    busy[worker] = attempts
                    crew.send(worker, attempts.task)
    finally:
        crew.stop()


def surroundings(threads: int | None) -> dict[str, str]:
    """Variables of a worker's environment: a task's module must be found there as here, and waiting must not cost."""
    own = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    own["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")  # workers that spin slow each other down
    return own if threads is None else own | {"OMP_NUM_THREADS": str(threads)}


@final
@dataclass(frozen=True, eq=False)
class _Process:
    child: "subprocess.Popen[bytes]"
    pipe: Connection
    errors: IO[bytes]

    def end(self) -> str:
        """Wait for it and clear up; how it went, in words."""
        code = self.child.wait()
        self.errors.seek(0)
        said = self.errors.read()[-4000:].decode("utf-8", "replace").strip().splitlines()
        self.errors.close()
        self.pipe.close()
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"a worker process that died ({ended}{': ' + said[-1][:300] if said else ''})"


@final
class _Processes:
    """A crew of interpreters with a pipe to each."""

    def __init__(self, setup: Task | None, threads: int | None):
        self._setup, self._environment = setup, os.environ | surroundings(threads)
        self._processes: dict[Connection, _Process] = {}

    def start(self) -> _Process:
        ours, theirs = Pipe()
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the worker goes)
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from howsmooth.run.pool import serve; serve({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the parent, which decides when to stop
            )
        self._processes[ours] = process = _Process(child, ours, errors)
        self.send(process, self._setup)
        return process

    def send(self, worker: _Process, task: Task | None) -> None:
        with contextlib.suppress(OSError):  # it has died; the end of its pipe will say so
            worker.pipe.send(task)

    def wait(self) -> list[tuple[_Process, Outcome]]:
        heard = []
        for pipe in wait(self._processes):
            assert isinstance(pipe, Connection)
            try:
                heard.append((self._processes[pipe], pipe.recv()))
            except (EOFError, OSError):
                process = self._processes.pop(pipe)
                heard.append((process, Outcome("died", reason=process.end())))
        return heard

    def stop(self) -> None:
        for process in self._processes.values():
            process.child.kill()
        for process in self._processes.values():
            process.end()
        self._processes.clear()


def serve(descriptor: int) -> None:
    """What a worker process runs: its setup comes first, then tasks; an outcome goes back for each."""
    pipe, inbox = Connection(descriptor), SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, inbox), daemon=True).start()
    worker = Worker(inbox.get())
    pipe.send(worker.prepare())
    while True:
        pipe.send(worker.perform(inbox.get()))


def _listen(pipe: Connection, inbox: "SimpleQueue[Task | None]") -> None:
    """Pass tasks on; the end of the pipe is the end of the parent, so of this process, whatever it is doing."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(pipe.recv())
    os._exit(0)
