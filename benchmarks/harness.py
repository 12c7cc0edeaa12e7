"""Timing, the environment it was taken in, and where results go."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


class WrongAnswerError(Exception):
    """Two methods disagree: nothing is timed."""


def agree(name: str, got: float, truth: float, tolerance: float) -> None:
    """Refuse to go on unless `got` is within `tolerance` of `truth`, relatively."""
    if not abs(got - truth) <= tolerance * abs(truth):
        raise WrongAnswerError(f"{name}: expected {truth:.8g} within {tolerance:g}, got {got:.8g}; no time is reported")


def seconds(run: Callable[[], object], repeat: int = 5) -> float:
    """Median wall time after one warm-up."""
    run()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def side_by_side(
    runs: Sequence[Callable[[], object]], repeat: int = 5, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Median wall time of each, the runs taking turns so that a busy spell hits all of them.

    clock: `time.process_time` counts the processor's seconds instead, which other programs do not add to.
    """
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeat):
        for run, taken in zip(runs, times, strict=True):
            start = clock()
            run()
            taken.append(clock() - start)
    return [statistics.median(t) for t in times]


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "blas": "mkl" if torch.backends.mkl.is_available() else "other",
        "capability": torch.backends.cpu.get_cpu_capability(),
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(title: str, rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text."""
    columns = list(rows[0])
    cells = [[_cell(row[c]) for c in columns] for row in rows]
    widths = [max(len(c), *(len(r[i]) for r in cells)) for i, c in enumerate(columns)]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in (columns, *cells)]
    return f"\n{title}\n" + "\n".join(lines)


def save(name: str, rows: list[dict[str, Any]]) -> Path:
    """Write rows and environment as JSON."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    return path


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
