"""Every bound over the ball of radius R, in a fixed order: of softmax, then of the layer's own kind."""

from howsmooth.errors import BadInputError
from howsmooth.kernels.tensors import float32_products
from howsmooth.maps import Attention
from howsmooth.settings import number, whole
from howsmooth.theory.bound import Bound
from howsmooth.theory.constants import Constants, constants
from howsmooth.theory.kinds import published, slopes, sums, tied
from howsmooth.theory.kinds.clusters import clusters
from howsmooth.theory.over_ball import castin2024, columns
from howsmooth.theory.over_ball.two_clusters import two_clusters

LONGEST_TOKEN = 1e150  # lengths of tokens below it have squares in float64


@float32_products()
def ball_bounds(attn: Attention, n: int, radius: float) -> list[Bound]:
    """Bounds on the Lipschitz constant of a layer over `n` tokens of length at most `radius`.

    Rows that do not apply say why. Rows marked mean field are of measures: the upper ones hold for every number of tokens,
    the lower ones (B5, B16) are reached once there are enough of them, about `e^{2‖A‖R²}`. Statements and proofs:
    docs/explanation/bounds.md; of other kinds than softmax, whose rows come last, docs/explanation/kinds.md. With a LayerNorm
    or RMSNorm in front, `radius = norm_radius(norm)`.

    >>> import torch
    >>> attn = Attention.from_matrices(-torch.eye(2), torch.eye(2))
    >>> [(b.id, round(b.value, 2)) for b in ball_bounds(attn, n=100, radius=1.0) if b.applies and b.id in ("B1", "B8", "B15")]
    [('B1', 38.77), ('B8', 4.84), ('B15', 2.99)]
    """
    if not isinstance(attn, Attention):
        raise BadInputError(
            f"expected an Attention layer, got {type(attn).__name__}; for attention after a norm pass the layer alone, "
            "with radius=norm_radius(norm)"
        )
    n = check_count(n)
    expected = f"a finite radius, at least 0 and below {LONGEST_TOKEN:g}"
    radius = number(radius, expected, "give the length of the longest token", least=0.0)
    # on the CPU: they are made of hundreds of small decompositions, which a GPU takes one after the other
    return rows_over_ball(constants(attn.to("cpu")), n, radius)


def rows_over_ball(layer: Constants, n: int, radius: float) -> list[Bound]:
    """The bounds of a layer whose constants are known."""
    own = [] if layer.attn.kind.traits.plain else [*upper_rows(layer, n, radius), clusters(layer, n, radius)]
    return [*softmax_rows(layer, n, radius), *own]


def softmax_rows(layer: Constants, n: int, radius: float) -> list[Bound]:
    """The rows of softmax attention, which say of other kinds that they do not apply."""
    return [
        castin2024.upper(layer, n, radius),
        castin2024.lower(layer, n, radius),
        castin2024.multi_head(layer, n, radius),
        castin2024.mean_field(layer, radius),
        castin2024.mean_field_lower(layer, radius),
        columns.tokens(layer, n, radius),
        columns.spread(layer, n, radius),
        columns.exact_columns(layer, n, radius),
        columns.causal(layer, n, radius),
        columns.causal_positive(layer, n, radius),
        columns.spread(layer, None, radius),
        columns.exact_columns(layer, None, radius),
        columns.causal_mean_field(layer, radius),
        columns.causal_positive(layer, None, radius),
        two_clusters(layer, n, radius),
        two_clusters(layer, None, radius),
    ]


def upper_rows(layer: Constants, n: int, radius: float) -> list[Bound]:
    """The upper bounds of kinds other than softmax."""
    traits = layer.attn.kind.traits
    if traits.softmax:
        return []
    if traits.logistic is not None:
        return [published.sigmoid_over_ball(layer, n, radius), sums.sigmoid(layer, n, radius)]
    if traits.top is not None:
        return [sums.hard(layer, n)]
    if traits.balancing is not None:
        return [sums.sinkhorn_limit(layer, radius), sums.sinkhorn(layer, n, radius)]
    if traits.two_softmaxes is not None:
        return [slopes.difference(layer, m, radius) for m in (n, None)]
    if not traits.divided:
        return [sums.products(layer, n, radius)]
    rows = [slopes.by_slopes(layer, m, radius) for m in (n, None)]
    if traits.unit_vectors is not None:
        return [published.cosine(layer, n), *rows]
    if traits.distances is not None:
        own = [tied.tied(layer, m, radius) for m in (n, None)]
        return [tied.as_published(layer, n, radius), *rows, *own, tied.tied_everywhere(layer, n, radius)]
    return rows


def check_count(n: int | None) -> int:
    """A number of tokens, checked."""
    return whole(n, "a whole number of tokens n, at least 1", "count the tokens", least=1)
