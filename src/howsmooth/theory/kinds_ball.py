"""Bounds over the ball for kinds of attention other than plain softmax, in a fixed order (docs/explanation/kinds.md)."""

from howsmooth.kernels.kinds import L2, Cosine, Differential, Hard, Linear, Sigmoid, Sinkhorn, Softmax
from howsmooth.theory import kinds_difference, kinds_l2, kinds_sinkhorn, kinds_slopes, kinds_sums, qi2023, ramapuram2024
from howsmooth.theory.bound import Bound
from howsmooth.theory.constants import Constants
from howsmooth.theory.kinds_clusters import clusters


def rows_of_kind(layer: Constants, n: int, radius: float) -> list[Bound]:
    """The rows of the layer's own kind; none for softmax without a sink, whose table says more."""
    kind = layer.layer.kind
    if isinstance(kind, Softmax) and kind.sink is None:
        return []
    return [*upper_rows(layer, n, radius), clusters(layer, n, radius)]


def upper_rows(layer: Constants, n: int, radius: float) -> list[Bound]:
    """Those from above."""
    kind = layer.layer.kind
    if isinstance(kind, Sigmoid):
        return [ramapuram2024.over_ball(layer, n, radius), kinds_sums.sigmoid(layer, n, radius)]
    if isinstance(kind, Hard):
        return [kinds_sums.hard(layer, n)]
    if isinstance(kind, Sinkhorn):
        return [kinds_sinkhorn.limit(layer, radius), kinds_sinkhorn.finite(layer, n, radius)]
    if isinstance(kind, Differential):
        return [kinds_difference.difference(layer, m, radius) for m in (n, None)]
    if isinstance(kind, Linear) and not kind.normalized:
        return [kinds_sums.products(layer, n, radius)]
    if not isinstance(kind, L2 | Cosine | Linear):
        return []
    rows = [kinds_slopes.by_slopes(layer, m, radius) for m in (n, None)]
    if isinstance(kind, Cosine):
        return [qi2023.everywhere(layer, n), *rows]
    if isinstance(kind, L2):
        tied = [kinds_l2.tied(layer, m, radius) for m in (n, None)]
        return [kinds_l2.published(layer, n, radius), *rows, *tied, kinds_l2.tied_everywhere(layer, n, radius)]
    return rows
