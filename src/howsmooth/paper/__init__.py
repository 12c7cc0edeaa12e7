"""The experiments of Castin, Ablin & Peyré, *How Smooth Is Attention?*, ICML 2024 (docs/reference/reproduction.md).

Everything here is written with public names alone: those that `howsmooth` or one of its packages exports.
"""

from howsmooth.paper.adversarial import grow, scan
from howsmooth.paper.attacks import robustness
from howsmooth.paper.ball import ladder
from howsmooth.paper.meanfield import worst_measure
from howsmooth.paper.reproduction import reproduce
from howsmooth.paper.splitting_maps import frequency, splitting_map

__all__ = ["frequency", "grow", "ladder", "reproduce", "robustness", "scan", "splitting_map", "worst_measure"]
