"""The experiments of Castin, Ablin & Peyré, *How Smooth Is Attention?*, ICML 2024, measured again (docs/reproduction.md).

Everything here is written with public names alone: those that `howsmooth` or one of its packages exports.
"""

from howsmooth.paper.attacks import Robustness, draw_robustness, robustness
from howsmooth.paper.ball import TokenGrowth, draw_ladder, draw_worst, grow, ladder, scan
from howsmooth.paper.curves import curves_of, exponents
from howsmooth.paper.drawing import check_figure, make_folder, save_rows
from howsmooth.paper.meanfield import (
    convergence_table,
    draw_convergence,
    draw_frequency,
    draw_map,
    draw_worst_measures,
    frequency,
    gaussian_convergence,
    map_table,
    random_layers,
    shares,
    splitting_map,
    worst_clusters,
    worst_measures,
)
from howsmooth.paper.page import write_reproduction
from howsmooth.paper.protocol import PAPER, PARTS, QUICK, Part, Protocol, Reproduced, reproduce

__all__ = [
    "PAPER",
    "PARTS",
    "QUICK",
    "Part",
    "Protocol",
    "Reproduced",
    "Robustness",
    "TokenGrowth",
    "check_figure",
    "convergence_table",
    "curves_of",
    "draw_convergence",
    "draw_frequency",
    "draw_ladder",
    "draw_map",
    "draw_robustness",
    "draw_worst",
    "draw_worst_measures",
    "exponents",
    "frequency",
    "gaussian_convergence",
    "grow",
    "ladder",
    "make_folder",
    "map_table",
    "random_layers",
    "reproduce",
    "robustness",
    "save_rows",
    "scan",
    "shares",
    "splitting_map",
    "worst_clusters",
    "worst_measures",
    "write_reproduction",
]
