"""Run a plan into a results file, from the start or from where it stopped."""

import contextlib
import importlib.metadata
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from howsmooth.errors import BadInputError
from howsmooth.progress import Progress, progress_bar
from howsmooth.run.plan import Plan
from howsmooth.run.pool import Engine, Local
from howsmooth.run.store import Store


@final
@dataclass(frozen=True)
class Sweep:
    """How a sweep ended. `done + failed` is the length of the plan, `skipped` of the done ones were done before."""

    path: Path
    done: int
    failed: int
    skipped: int


def sweep(
    plan: Plan,
    path: str | Path,
    *,
    engine: Engine | None = None,
    resume: bool = False,
    progress: Progress | bool | None = None,
    command: str | None = None,
    context: Any = None,
) -> Sweep:
    """Run what the file does not have yet, and commit each result as it arrives.

    An interruption at any moment, a power cut too, loses only the tasks then under way. A task that fails is recorded with its
    reason and does not stop the others. A second sweep on the same file is refused while the first one runs. What tasks print
    goes to standard error: standard output is the command's own.

    Args:
        plan: The tasks.
        path: Of the results file, `.sqlite`.
        engine: `Local(workers=…)` or `Ray(…)`, this process by default.
        resume: Continue a file that has results; failed tasks are tried again.
        progress: A bar where a person watches; False for none.
        command: Kept beside the rows, the command line by default.
        context: What the plan's setup returns, where you have it already: tasks in this process use it, workers elsewhere
            build their own.

    Returns:
        How many tasks were done, failed and skipped.

    >>> import statistics, tempfile
    >>> from howsmooth.run import read
    >>> plan = Plan.of(statistics.fmean, [{"data": [1, 2]}, {"data": []}])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ended = sweep(plan, f"{folder}/results.sqlite")
    ...     rows = read(f"{folder}/results.sqlite")
    >>> ended.done, ended.failed, rows[0].value, rows[1].status
    (1, 1, 1.5, 'failed')
    """
    if context is not None and plan.tasks and plan.setup is None:
        raise BadInputError("expected a plan with a setup for the context, got one without; plan it with setup=…")
    engine = engine or Local()
    with Store(path, resume=resume) as store, progress_bar("measuring", progress) as shown:
        known = store.begin(plan, engine.name, command or " ".join(sys.argv), versions())
        todo = tuple(task for task in plan.tasks if known.get(task.key) != "done")
        skipped = len(plan.tasks) - len(todo)
        shown.begin(len(plan.tasks), skipped)
        failed = 0
        running = contextlib.closing(engine.run(Plan(todo), context))  # ends the workers whatever happens
        with contextlib.redirect_stdout(sys.stderr), running as outcomes:
            for task, outcome in outcomes:
                store.add(task, outcome)
                failed += outcome.status == "failed"
                shown.advance(outcome.status == "failed")
    return Sweep(Path(path), len(plan.tasks) - failed, failed, skipped)


def versions() -> dict[str, str]:
    """Of everything a number may depend on."""
    software = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("howsmooth", "torch", "transformers", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            software[name] = importlib.metadata.version(name)
    return software
