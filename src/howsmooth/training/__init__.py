"""Smoothness while a model trains: follow it, log it, steer by it."""

from howsmooth.training.clipping import Clipped, ClippedHead, clip_
from howsmooth.training.penalty import SmoothnessPenalty, WarmStart, smoothness
from howsmooth.training.tracker import Check, Checked, Tracker, TrackingWarning

__all__ = [
    "Check",
    "Checked",
    "Clipped",
    "ClippedHead",
    "SmoothnessPenalty",
    "Tracker",
    "TrackingWarning",
    "WarmStart",
    "clip_",
    "smoothness",
]
