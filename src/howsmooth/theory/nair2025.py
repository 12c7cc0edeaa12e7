"""Softmax alone: Nair, "Softmax is ½-Lipschitz: A Tight Bound Across All ℓp Norms", 2025, arXiv 2510.23012."""

from howsmooth.theory.bound import Bound


def softmax_bound() -> Bound:
    """D4: `‖D softmax(s)‖_{p→p} ≤ ½` for every p ≥ 1 and every s; two equal logits reach it (docs/point-bounds.md 4.11).

    A statement about softmax, not about a layer: it enters bounds on one, and is listed for what it says by itself.

    >>> softmax_bound().statement
    '‖D softmax‖_{p→p} ≤ 1/2 for every p ≥ 1'
    """
    return Bound(
        id="D4",
        name="softmax alone",
        side="upper",
        log_value=None,
        statement="‖D softmax‖_{p→p} ≤ 1/2 for every p ≥ 1",
        source="Nair 2025, arXiv 2510.23012",
        assumptions="the softmax function by itself: logits in, weights out",
        reason="½ bounds softmax alone, not a layer",
    )
