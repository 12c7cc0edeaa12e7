"""Ray actors: the same sweep on a cluster. Each holds the context it built once; one that is lost is replaced.

A cluster that no longer answers ends the sweep with a sentence.
"""

import contextlib
import importlib
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, final

from howsmooth.errors import BadInputError, WorkerError
from howsmooth.run.plan import Plan, Task
from howsmooth.run.pool import Outcomes, Schedule, Worker, check_counts, surroundings
from howsmooth.run.store import Outcome

_ANSWER = 120.0  # seconds it has to answer: time to start a process on a busy machine


@final
@dataclass(frozen=True)
class Ray:
    """Tasks on a Ray cluster, which needs howsmooth and the model on every machine.

    Attributes:
        address: Of a running cluster, `auto` for the one this machine belongs to; None starts one here and ends it
            afterwards.
        workers: Actors; by default as many as the cluster has room for.
        tries: Attempts at a task, on different actors.
        cpus: What each actor takes, and its threads.
        gpus: What each actor takes.
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
        try:
            if ours:
                self._connect(ray)
            room = self.room(ray)
            crew = _Actors(ray, plan.setup, self)
            yield from Schedule(crew, plan, min(self.workers or room, room), self.tries).run()
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
        except Exception as error:  # Ray raises plain ones too
            raise WorkerError(
                f"expected a Ray cluster at {self.address or 'this machine'}, got: {_said(error)}; "
                "start one with `ray start --head`"
            ) from None

    def room(self, ray: Any) -> int:
        """How many actors the cluster holds."""
        try:
            have = ray.cluster_resources()
        except Exception as error:
            raise WorkerError(_silent(_said(error))) from None
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
        raise WorkerError(
            "expected the package ray for the engine Ray, which is missing; pip install 'howsmooth[ray]'"
        ) from None


def _said(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:300]


def _silent(how: str) -> str:
    return (
        f"expected a Ray cluster that answers, got: {how}; what was done is kept, look at the cluster (`ray status`) and resume"
    )


@final
class _Actors:
    """A crew of actors. Ray's own restarts are off: the schedule decides who tries what again."""

    def __init__(self, ray: Any, setup: Task | None, engine: Ray):
        self._ray, self._setup, self._engine = ray, setup, engine
        variables = surroundings(engine.cpus)
        if engine.address is not None:  # other machines have their own paths
            del variables["PYTHONPATH"]
        remote = ray.remote(max_restarts=0, max_task_retries=0, num_cpus=engine.cpus, num_gpus=engine.gpus)
        self._actor = remote(Worker).options(runtime_env={"env_vars": variables})
        self._actors: list[Any] = []

    def start(self) -> Any:
        self._actors.append(self._actor.remote(self._setup))
        return self._actors[-1]

    def send(self, worker: Any, task: Task | None) -> Future[Outcome]:
        return _outcome(worker.answer.remote(task))

    def check(self) -> None:
        """Long tasks are no reason to worry, a cluster that does nothing at all any more is one to stop."""
        try:
            self._ray.get(self._ray.remote(num_cpus=0)(_answer).remote(), timeout=_ANSWER)
        except Exception as error:
            self._actors.clear()  # nobody is there to end them
            how = f"no answer in {_ANSWER:g} s" if isinstance(error, TimeoutError) else _said(error)
            raise WorkerError(_silent(how)) from None
        self._engine.room(self._ray)  # refuses where no machine is left that holds an actor

    def stop(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(Exception):  # it has gone, or its machine has
                self._ray.kill(actor)


def _outcome(request: Any) -> Future[Outcome]:
    """The answer to a request of an actor; an error of Ray's own is its end."""
    answer: Future[Outcome] = Future()

    def hear(future: Future[Outcome]) -> None:
        error = future.exception()
        how = f"an actor that died ({type(error).__name__}: {_said(error)})" if error else None
        answer.set_result(Outcome("died", reason=how) if how else future.result())

    request.future().add_done_callback(hear)
    return answer


def _answer() -> None:
    """What a cluster is asked to do to show that it can."""
