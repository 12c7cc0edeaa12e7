"""Local processes: fresh interpreters that share nothing with this one, or this very process for one worker."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, final

from howsmooth.errors import BadInputError, WorkerError
from howsmooth.run.engine import Event, schedule
from howsmooth.run.plan import Call, Plan, Task
from howsmooth.run.store import Outcome
from howsmooth.run.worker import Worker


@final
@dataclass(frozen=True)
class Local:
    """Tasks on this machine.

    workers: processes; one works in this process.  tries: attempts at a task before it counts as failed.
    threads: for each worker; by default the machine's cores are shared out, unless OMP_NUM_THREADS says otherwise.
    """

    workers: int = 1
    tries: int = 3
    threads: int | None = None

    def __post_init__(self):
        for name in ("workers", "tries", "threads"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1) and not (name == "threads" and value is None):
                raise BadInputError(f"expected {name} of at least 1, got {value!r}; give a whole number")

    @property
    def name(self) -> str:
        return f"local, {self.workers} worker{'s' * (self.workers > 1)}"

    def run(self, plan: Plan, tasks: Sequence[Task]) -> Generator[Outcome, None, None]:
        if self.workers == 1:
            yield from _here(plan, tasks)
            return
        crew = _Processes(plan.setup, self.threads or share(self.workers))
        try:
            yield from schedule(crew, tasks, self.workers, self.tries)
        finally:
            crew.stop()


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def share(workers: int) -> int | None:
    """Threads for each worker, or None where the environment has decided."""
    return None if "OMP_NUM_THREADS" in os.environ else max(1, cores() // workers)


def _here(plan: Plan, tasks: Sequence[Task]) -> Generator[Outcome, None, None]:
    """In this process: no other worker to try on, so a task is tried once."""
    worker = Worker(plan.setup)
    ready = worker.prepare() if tasks else {"event": "ready"}
    if ready["event"] != "ready":
        raise WorkerError(ready["reason"] if ready["refused"] else f"the worker cannot start: {ready['reason']}")
    for task in tasks:
        with contextlib.redirect_stdout(sys.stderr):  # as in a worker process: standard output is the command's own
            answer = worker.perform(task.call)
        yield Outcome(task, answer["event"], answer["value"], answer["reason"], 1, answer["seconds"])


@dataclass
class _Process:
    child: "subprocess.Popen[bytes]"
    errors: IO[bytes]
    unread: bytes = b""


@final
class _Processes:
    """A crew of interpreters, one pipe to and one from each."""

    def __init__(self, setup: Call | None, threads: int | None):
        self._hello = json.dumps({"setup": asdict(setup) if setup else None})
        paths = [path or os.getcwd() for path in sys.path]  # a task's module must be found there as here
        self._environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        self._environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # workers that spin while they wait slow each other down
        if threads is not None:
            self._environment["OMP_NUM_THREADS"] = str(threads)
        self._processes: dict[int, _Process] = {}
        self._selector = selectors.DefaultSelector()
        self._count = 0

    def start(self) -> int:
        self._count += 1
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the worker goes)
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "howsmooth.run.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=self._environment,
        )
        self._processes[self._count] = _Process(child, errors)
        assert child.stdout is not None
        self._selector.register(child.stdout, selectors.EVENT_READ, self._count)
        self._write(self._count, self._hello)
        return self._count

    def send(self, worker: int, call: Call) -> None:
        self._write(worker, json.dumps(asdict(call)))

    def _write(self, worker: int, line: str) -> None:
        pipe = self._processes[worker].child.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # it has died; the end of its output will say so
            pipe.write(line.encode() + b"\n")
            pipe.flush()

    def wait(self) -> list[Event]:
        events: list[Event] = []
        while not events:
            for key, _ in self._selector.select():
                events += self._read(key.data)
        return events

    def _read(self, worker: int) -> list[Event]:
        process = self._processes[worker]
        assert process.child.stdout is not None
        piece = os.read(process.child.stdout.fileno(), 1 << 20)
        if not piece:
            return [Event(worker, None, self._bury(worker))]
        *lines, process.unread = (process.unread + piece).split(b"\n")
        return [Event(worker, _answer(line)) for line in lines]

    def _bury(self, worker: int) -> str:
        """Clear up after a worker that is gone; how it went, in words."""
        process = self._processes.pop(worker)
        self._selector.unregister(process.child.stdout)  # pyright: ignore[reportArgumentType]
        code = process.child.wait()
        process.errors.seek(0)
        said = process.errors.read()[-4000:].decode("utf-8", "replace").strip().splitlines()
        _close(process)
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"a worker process that died ({ended}{': ' + said[-1][:300] if said else ''})"

    def stop(self) -> None:
        for process in self._processes.values():
            process.child.kill()
        for process in self._processes.values():
            process.child.wait()
            _close(process)
        self._processes.clear()
        self._selector.close()


def _close(process: _Process) -> None:
    for pipe in (process.child.stdin, process.child.stdout, process.errors):
        assert pipe is not None
        with contextlib.suppress(OSError):  # a last line for a process that is gone
            pipe.close()


def _answer(line: bytes) -> dict[str, Any]:
    return json.loads(line)
