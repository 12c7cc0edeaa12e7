"""Ray actors: the same sweep on a cluster. Each holds the state it built once; one that is lost is replaced."""

import importlib
import os
import sys
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from howsmooth.errors import BadInputError, WorkerError
from howsmooth.run.engine import Event, schedule
from howsmooth.run.plan import Call, Plan, Task
from howsmooth.run.store import Outcome
from howsmooth.run.worker import Worker


@final
@dataclass(frozen=True)
class Ray:
    """Tasks on a Ray cluster, which needs howsmooth and the model on every machine.

    address: of a running cluster, `auto` for the one this machine belongs to; None starts one here and ends it afterwards.
    workers: actors; by default as many as the cluster has room for.  tries: attempts at a task, on different actors.
    cpus, gpus: what each actor takes; its threads are its cpus.
    """

    address: str | None = None
    workers: int | None = None
    tries: int = 3
    cpus: int = 1
    gpus: float = 0.0

    def __post_init__(self):
        whole = {"workers": self.workers or 1, "tries": self.tries, "cpus": self.cpus}
        for name, value in whole.items():
            if not isinstance(value, int) or value < 1:
                raise BadInputError(f"expected {name} of at least 1, got {value!r}; give a whole number")
        if self.workers == 0 or not self.gpus >= 0:
            raise BadInputError(f"expected workers ≥ 1 and gpus ≥ 0, got {self.workers} and {self.gpus}; correct them")

    @property
    def name(self) -> str:
        return f"ray, {self.address or 'a cluster of its own'}"

    def run(self, plan: Plan, tasks: Sequence[Task]) -> Generator[Outcome, None, None]:
        if not tasks:
            return
        ray = load()
        ours = not ray.is_initialized()
        if ours:
            _connect(ray, self.address, (self.workers or 1) * self.cpus if self.workers else None)
        crew = None
        try:
            crew = _Actors(ray, plan.setup, self.cpus, self.gpus, own_machine=self.address is None)
            room = _room(ray, self.cpus, self.gpus)
            yield from schedule(crew, tasks, min(self.workers or room, room), self.tries)
        finally:
            if crew is not None:
                crew.stop()
            if ours:
                ray.shutdown()


def load() -> Any:
    """The library itself, or a sentence that says how to get it."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise WorkerError("expected the package ray for --engine ray, which is missing; pip install 'howsmooth[ray]'") from None


def _connect(ray: Any, address: str | None, cpus: int | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    if address is None:
        options |= {"num_cpus": cpus, "include_dashboard": False}
    try:
        ray.init(address=address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise WorkerError(
            f"expected a Ray cluster at {address or 'this machine'}, got: {said}; start one with `ray start --head`"
        ) from None


def _room(ray: Any, cpus: int, gpus: float) -> int:
    """How many actors the cluster holds."""
    have = ray.cluster_resources()
    room = int(have.get("CPU", 0) // cpus)
    room = min(room, int(have.get("GPU", 0) // gpus)) if gpus else room
    if room < 1:
        raise WorkerError(
            f"expected a cluster with {cpus} CPUs and {gpus:g} GPUs for a worker, got {have.get('CPU', 0):g} and "
            f"{have.get('GPU', 0):g}; ask for less"
        )
    return room


@final
class _Actors:
    """A crew of actors. Ray's own restarts are off: the scheduler decides who tries what again."""

    def __init__(self, ray: Any, setup: Call | None, cpus: int, gpus: float, own_machine: bool):
        self._ray, self._setup = ray, asdict(setup) if setup else None
        variables = {"OMP_NUM_THREADS": str(cpus), "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
        if own_machine:  # a task's module must be found there as here
            variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        remote = ray.remote(max_restarts=0, max_task_retries=0, num_cpus=cpus, num_gpus=gpus)
        self._actor = remote(_Actor).options(runtime_env={"env_vars": variables})
        self._actors: dict[int, Any] = {}
        self._pending: dict[Any, int] = {}
        self._count = 0

    def start(self) -> int:
        self._count += 1
        actor = self._actor.remote(self._setup)
        self._actors[self._count] = actor
        self._pending[actor.prepare.remote()] = self._count
        return self._count

    def send(self, worker: int, call: Call) -> None:
        self._pending[self._actors[worker].perform.remote(asdict(call))] = worker

    def wait(self) -> list[Event]:
        done, _ = self._ray.wait(list(self._pending), num_returns=1)
        events = []
        for reference in done:
            worker = self._pending.pop(reference)
            try:
                events.append(Event(worker, self._ray.get(reference)))
            except self._ray.exceptions.RayError as error:
                said = (str(error).strip().splitlines() or [""])[0]
                self._actors.pop(worker)
                events.append(Event(worker, None, f"an actor that died ({type(error).__name__}: {said[:300]})"))
        return events

    def stop(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        self._pending.clear()


class _Actor:
    """A worker as Ray sees it."""

    def __init__(self, setup: dict[str, str] | None):
        self._worker = Worker(Call(**setup) if setup else None)

    def prepare(self) -> dict[str, Any]:
        return self._worker.prepare()

    def perform(self, call: dict[str, str]) -> dict[str, Any]:
        return self._worker.perform(Call(**call))
