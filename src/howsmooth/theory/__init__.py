"""What theory says: bounds as rows, over a ball and at a point, and when splitting pays."""

from howsmooth.theory.at_point.table import point_bounds
from howsmooth.theory.bound import Bound, Bounds
from howsmooth.theory.constants import constants as constants_of
from howsmooth.theory.over_ball.columns import tokens as sqrt_bound
from howsmooth.theory.over_ball.table import ball_bounds
from howsmooth.theory.scaled import norm_radius
from howsmooth.theory.splitting import Splitting

__all__ = ["Bound", "Bounds", "Splitting", "ball_bounds", "constants_of", "norm_radius", "point_bounds", "sqrt_bound"]
