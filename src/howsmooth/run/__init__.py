"""Sweeps that survive: a plan of tasks, a results file, workers here or on a cluster."""

from howsmooth.run.files import check_folder, check_writable, claim_folder, to_frame, write_table, writing
from howsmooth.run.plan import Plan, Task
from howsmooth.run.pool import Engine, Local
from howsmooth.run.ray import Ray
from howsmooth.run.store import Record, read
from howsmooth.run.sweeping import Sweep, sweep, versions

__all__ = [
    "Engine",
    "Local",
    "Plan",
    "Ray",
    "Record",
    "Sweep",
    "Task",
    "check_folder",
    "check_writable",
    "claim_folder",
    "read",
    "sweep",
    "to_frame",
    "versions",
    "write_table",
    "writing",
]
