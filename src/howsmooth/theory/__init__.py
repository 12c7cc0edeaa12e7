"""What theory says: bounds as rows, over a ball and at a point, and when splitting pays."""

from howsmooth.theory.ball import ball_bounds
from howsmooth.theory.bound import Bound, Bounds
from howsmooth.theory.constants import norm_radius
from howsmooth.theory.point import point_bounds
from howsmooth.theory.splitting import Splitting

__all__ = ["Bound", "Bounds", "Splitting", "ball_bounds", "norm_radius", "point_bounds"]
