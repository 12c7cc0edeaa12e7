"""Sweeps that survive: a plan of tasks, a results file, workers here or on a cluster."""

from howsmooth.runner.engine import Engine
from howsmooth.runner.export import to_frame, write_table
from howsmooth.runner.local import Local
from howsmooth.runner.plan import Call, Plan, Task
from howsmooth.runner.progress import progress_bar
from howsmooth.runner.ray import Ray
from howsmooth.runner.run import Sweep, sweep
from howsmooth.runner.store import Row, read

__all__ = [
    "Call",
    "Engine",
    "Local",
    "Plan",
    "Ray",
    "Row",
    "Sweep",
    "Task",
    "progress_bar",
    "read",
    "sweep",
    "to_frame",
    "write_table",
]
