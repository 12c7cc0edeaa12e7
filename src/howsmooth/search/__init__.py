"""Worst inputs: configurations, ascent over sets, and attacks."""

from howsmooth.search.attacks import Attack, Attacks, attack
from howsmooth.search.families import configurations, worst_configuration
from howsmooth.search.sets import Ball, BallAround, Ellipsoid
from howsmooth.search.worst import WorstCase, worst_case

__all__ = [
    "Attack",
    "Attacks",
    "Ball",
    "BallAround",
    "Ellipsoid",
    "WorstCase",
    "attack",
    "configurations",
    "worst_case",
    "worst_configuration",
]
