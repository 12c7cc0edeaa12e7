"""Smoothness while a model trains: follow it, log it, steer by it.

Callbacks of trainers are in `howsmooth.training.huggingface` and `howsmooth.training.in_lightning`.
"""

from howsmooth.training.clipping import Clipped, ClippedHead, clip_
from howsmooth.training.penalty import SmoothnessPenalty, WarmStart, smoothness
from howsmooth.training.recorder import Alarm, Raised, Recorder
from howsmooth.training.sharded import gathered
from howsmooth.training.tracker import Check, Checked, Tracker, TrackingWarning

__all__ = [
    "Alarm",
    "Check",
    "Checked",
    "Clipped",
    "ClippedHead",
    "Raised",
    "Recorder",
    "SmoothnessPenalty",
    "Tracker",
    "TrackingWarning",
    "WarmStart",
    "clip_",
    "gathered",
    "smoothness",
]
