"""Ray actors: the same sweep on a cluster. Each holds the context it built once; one that is lost is replaced."""

import importlib
from dataclasses import dataclass
from typing import Any, final

from howsmooth.errors import BadInputError, WorkerError
from howsmooth.run.plan import Plan, Task
from howsmooth.run.pool import Outcomes, Worker, check_counts, schedule, surroundings
from howsmooth.run.store import Outcome


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
        check_counts(workers=1 if self.workers is None else self.workers, tries=self.tries, cpus=self.cpus)
        if not self.gpus >= 0:
            raise BadInputError(f"expected gpus of at least 0, got {self.gpus}; give a number of graphics cards")

    @property
    def name(self) -> str:
        return f"ray, {self.address or 'a cluster of its own'}"

    def run(self, plan: Plan, context: Any = None) -> Outcomes:
        if not plan.tasks:
            return
        ray = load()
        ours = not ray.is_initialized()
        if ours:
            self._connect(ray)
        try:
            room = self._room(ray)
            yield from schedule(_Actors(ray, plan.setup, self), plan, min(self.workers or room, room), self.tries)
        finally:
            if ours:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
        if self.address is None:
            cpus = self.workers and self.workers * self.cpus
            options |= {"num_cpus": cpus, "include_dashboard": False}
        try:
            ray.init(address=self.address or "local", **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise WorkerError(
                f"expected a Ray cluster at {self.address or 'this machine'}, got: {said}; start one with `ray start --head`"
            ) from None

    def _room(self, ray: Any) -> int:
        """How many actors the cluster holds."""
        have = ray.cluster_resources()
        cpus, gpus = have.get("CPU", 0), have.get("GPU", 0)
        room = int(min(cpus // self.cpus, gpus // self.gpus if self.gpus else cpus))
        if room < 1:
            raise WorkerError(
                f"expected a cluster with {self.cpus} CPUs and {self.gpus:g} GPUs for a worker, got {cpus:g} and {gpus:g}; "
                "ask for less"
            )
        return room


def load() -> Any:
    """The library itself, or a sentence that says how to get it."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise WorkerError("expected the package ray for --engine ray, which is missing; pip install 'howsmooth[ray]'") from None


@final
class _Actors:
    """A crew of actors. Ray's own restarts are off: the schedule decides who tries what again."""

    def __init__(self, ray: Any, setup: Task | None, engine: Ray):
        self._ray, self._setup = ray, setup
        variables = surroundings(engine.cpus)
        if engine.address is not None:  # other machines have their own paths
            del variables["PYTHONPATH"]
        remote = ray.remote(max_restarts=0, max_task_retries=0, num_cpus=engine.cpus, num_gpus=engine.gpus)
        self._actor = remote(Worker).options(runtime_env={"env_vars": variables})
        self._pending: dict[Any, Any] = {}  # from what was asked for to the actor that does it
        self._living: set[Any] = set()

    def start(self) -> Any:
        actor = self._actor.remote(self._setup)
        self._living.add(actor)
        self._pending[actor.prepare.remote()] = actor
        return actor

    def send(self, worker: Any, task: Task) -> None:
        self._pending[worker.perform.remote(task)] = worker

    def wait(self) -> list[tuple[Any, Outcome]]:
        (reference,), _ = self._ray.wait(list(self._pending), num_returns=1)
        actor = self._pending.pop(reference)
        try:
            return [(actor, self._ray.get(reference))]
        except self._ray.exceptions.RayError as error:
            self._living.discard(actor)
            said = (str(error).strip().splitlines() or [""])[0]
            return [(actor, Outcome("died", reason=f"an actor that died ({type(error).__name__}: {said[:300]})"))]

    def stop(self) -> None:
        for actor in self._living:
            self._ray.kill(actor)
        self._living.clear()
        self._pending.clear()
