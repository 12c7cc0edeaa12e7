"""Bounds over the ball for kinds of attention other than plain softmax, in a fixed order (docs/explanation/kinds.md)."""

from howsmooth.theory import kinds_difference, kinds_l2, kinds_sinkhorn, kinds_slopes, kinds_sums, qi2023, ramapuram2024
from howsmooth.theory.bound import Bound
from howsmooth.theory.constants import Constants
from howsmooth.theory.kinds_clusters import clusters


def rows_of_kind(layer: Constants, n: int, radius: float) -> list[Bound]:
    """The rows of the layer's own kind; none for softmax without a sink, whose table says more."""
    return [] if layer.layer.kind.traits.plain else [*upper_rows(layer, n, radius), clusters(layer, n, radius)]


def upper_rows(layer: Constants, n: int, radius: float) -> list[Bound]:
    """The upper bounds among them."""
    traits = layer.layer.kind.traits
    if traits.softmax:
        return []
    if traits.logistic is not None:
        return [ramapuram2024.over_ball(layer, n, radius), kinds_sums.sigmoid(layer, n, radius)]
    if traits.top is not None:
        return [kinds_sums.hard(layer, n)]
    if traits.balancing is not None:
        return [kinds_sinkhorn.limit(layer, radius), kinds_sinkhorn.finite(layer, n, radius)]
    if traits.two_softmaxes is not None:
        return [kinds_difference.difference(layer, m, radius) for m in (n, None)]
    if not traits.divided:
        return [kinds_sums.products(layer, n, radius)]
    rows = [kinds_slopes.by_slopes(layer, m, radius) for m in (n, None)]
    if traits.unit_vectors is not None:
        return [qi2023.everywhere(layer, n), *rows]
    if traits.distances is not None:
        tied = [kinds_l2.tied(layer, m, radius) for m in (n, None)]
        return [kinds_l2.published(layer, n, radius), *rows, *tied, kinds_l2.tied_everywhere(layer, n, radius)]
    return rows
