"""Sweeps that survive: a plan of tasks, a results file, workers here or on a cluster."""

from howsmooth.run.engine import Engine
from howsmooth.run.export import to_frame, write_table
from howsmooth.run.plan import Call, Plan, Task
from howsmooth.run.pool import Local
from howsmooth.run.progress import Progress, progress_bar
from howsmooth.run.ray import Ray
from howsmooth.run.store import Row, Store, read
from howsmooth.run.sweeping import Sweep, sweep

__all__ = [
    "Call",
    "Engine",
    "Local",
    "Plan",
    "Progress",
    "Ray",
    "Row",
    "Store",
    "Sweep",
    "Task",
    "progress_bar",
    "read",
    "sweep",
    "to_frame",
    "write_table",
]
