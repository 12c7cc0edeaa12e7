"""Smoothness while a model trains: follow it, log it, steer by it."""

from howsmooth.training.tracker import Check, Checked, Tracker, TrackingWarning

__all__ = ["Check", "Checked", "Tracker", "TrackingWarning"]
