"""Worst inputs: configurations, ascent over sets, and attacks."""

from howsmooth.search.attacks import METHODS, Attack, Attacks, attack
from howsmooth.search.families import Configuration, Configured, configurations, eigenvector_configuration, worst_configuration
from howsmooth.search.radius import Radius
from howsmooth.search.sets import Ball, BallAround, Ellipsoid, TokenSet
from howsmooth.search.worst import WorstCase, find_near, find_worst, slope_at

__all__ = [
    "METHODS",
    "Attack",
    "Attacks",
    "Ball",
    "BallAround",
    "Configuration",
    "Configured",
    "Ellipsoid",
    "Radius",
    "TokenSet",
    "WorstCase",
    "attack",
    "configurations",
    "eigenvector_configuration",
    "find_near",
    "find_worst",
    "slope_at",
    "worst_configuration",
]
