"""Every bound over the ball, in a fixed order."""

from howsmooth.errors import BadInputError
from howsmooth.kernels.products import float32_products
from howsmooth.maps import Attention
from howsmooth.settings import number, whole
from howsmooth.theory import castin2024, ours
from howsmooth.theory.bound import Bound
from howsmooth.theory.constants import Constants, constants
from howsmooth.theory.kinds_ball import rows_of_kind

LARGEST = 1e150  # lengths of tokens below it have squares in float64


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
    expected = f"a finite radius, at least 0 and below {LARGEST:g}"
    radius = number(radius, expected, "give the length of the longest token", least=0.0)
    # on the CPU: they are made of hundreds of small decompositions, which a GPU takes one after the other
    return rows_over_ball(constants(attn.to("cpu")), n, radius)


def rows_over_ball(layer: Constants, n: int, radius: float) -> list[Bound]:
    """The same of a layer whose constants are known."""
    return [*softmax_rows(layer, n, radius), *rows_of_kind(layer, n, radius)]


def softmax_rows(layer: Constants, n: int, radius: float) -> list[Bound]:
    """Those of softmax attention; of other kinds they say that they do not apply."""
    return [
        castin2024.upper(layer, n, radius),
        castin2024.lower(layer, n, radius),
        castin2024.multi_head(layer, n, radius),
        castin2024.mean_field(layer, radius),
        castin2024.mean_field_lower(layer, radius),
        ours.tokens(layer, n, radius),
        ours.spread(layer, n, radius),
        ours.exact_columns(layer, n, radius),
        ours.causal(layer, n, radius),
        ours.causal_positive(layer, n, radius),
        ours.spread(layer, None, radius),
        ours.exact_columns(layer, None, radius),
        ours.causal_mean_field(layer, radius),
        ours.causal_positive(layer, None, radius),
        ours.two_clusters(layer, n, radius),
        ours.two_clusters(layer, None, radius),
    ]


def check_count(n: int | None) -> int:
    """A number of tokens, checked."""
    return whole(n, "a whole number of tokens n, at least 1", "count the tokens", least=1)
