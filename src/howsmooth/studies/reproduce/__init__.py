"""The experiments of Castin, Ablin & Peyré, *How Smooth Is Attention?*, ICML 2024, measured again (docs/reproduction.md)."""

from howsmooth.studies.reproduce.curves import PRINTED, Curve, Exponent, curves, exponents
from howsmooth.studies.reproduce.plan import PAPER, PARTS, QUICK, Part, Protocol, plan
from howsmooth.studies.reproduce.scripts import power_iteration, scripts_value

__all__ = [
    "PAPER",
    "PARTS",
    "PRINTED",
    "QUICK",
    "Curve",
    "Exponent",
    "Part",
    "Protocol",
    "curves",
    "exponents",
    "plan",
    "power_iteration",
    "scripts_value",
]
