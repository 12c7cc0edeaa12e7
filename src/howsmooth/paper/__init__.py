"""The experiments of Castin, Ablin & Peyré, *How Smooth Is Attention?*, ICML 2024, measured again (docs/howto/reproduction.md).

Everything here is written with public names alone: those that `howsmooth` or one of its packages exports.
"""

from howsmooth.paper.attacks import robustness
from howsmooth.paper.ball import grow, ladder, scan
from howsmooth.paper.meanfield import frequency, splitting_map, worst_measures
from howsmooth.paper.protocol import reproduce

__all__ = ["frequency", "grow", "ladder", "reproduce", "robustness", "scan", "splitting_map", "worst_measures"]
