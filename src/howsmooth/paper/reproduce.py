"""Run experiments into a folder's results file, and read what is there."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from howsmooth.errors import ResultsError
from howsmooth.paper.protocol import Part, Protocol, plan
from howsmooth.run import Engine
from howsmooth.run.plan import Plan
from howsmooth.run.progress import Progress
from howsmooth.run.store import Store, read
from howsmooth.run.sweeping import sweep

RESULTS = "results.sqlite"


@final
@dataclass(frozen=True)
class Reproduced:
    """What was asked for and measured. rows: of every task of the plan that is done.  failures: reasons, and how many tasks."""

    path: Path
    rows: tuple[dict[str, Any], ...]
    tasks: int
    skipped: int
    failures: dict[str, int]
    versions: dict[str, str]


def reproduce(
    parts: Sequence[Part],
    models: Sequence[str],
    folder: Path,
    *,
    protocol: Protocol,
    seed: int = 0,
    resume: bool = False,
    force: bool = False,
    engine: Engine | None = None,
    progress: Progress | None = None,
    command: str | None = None,
) -> Reproduced:
    """Measure what the parts need and the folder does not have yet; each result is kept as it arrives.

    models: pretrained ones beside the random models, by name or folder.  resume: continue what is in the folder.
    force: begin again, or write into a folder that holds other files.
    """
    check_folder(folder, resume, force)
    # plans first: an unknown model is refused before anything is written
    whole = functools.reduce(Plan.__add__, (plan(part, models, protocol, seed) for part in parts))
    path = folder / RESULTS
    if force and not resume and path.exists():
        with Store(path, resume=True):  # refused if another program writes it, or if it is no results file
            pass
        path.unlink()
    ended = sweep(whole, path, engine=engine, resume=resume, progress=progress, command=command)
    asked = {task.key for task in whole.tasks}
    kept = [row for row in read(path) if row.key in asked]
    done = [row for row in kept if row.status == "done"]
    flat = [value for row in done for value in (row.value if isinstance(row.value, list) else [row.value])]
    failures = Counter(str(row.reason) for row in kept if row.status == "failed")
    versions = done[-1].versions if done else {}
    return Reproduced(path, tuple(flat), len(whole.tasks), ended.skipped, dict(failures), versions)


def check_folder(folder: Path, resume: bool, force: bool) -> None:
    """Refuse a folder whose content might be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise ResultsError(f"expected a folder for the results, got the file {folder}; choose another name")
    if not folder.exists() or not any(folder.iterdir()) or force:
        return
    if not (folder / RESULTS).exists():
        raise ResultsError(f"expected a new folder, got {folder}, which holds other files; pass --force to write into it")
    if not resume:
        raise ResultsError(
            f"expected a new folder, got {folder}, which holds results; pass --resume to go on or --force to begin again"
        )
