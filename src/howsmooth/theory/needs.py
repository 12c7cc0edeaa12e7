"""What a theorem needs of a layer, by name, with the sentence for a layer that does not have it."""

from collections.abc import Callable

from howsmooth.maps import Attention

BILINEAR = ("no phases", "no norms")  # then logits are `⟨A x_i, x_j⟩` plus shifts, with one `A` for all positions

_NEEDS: dict[str, tuple[Callable[[Attention], bool], str]] = {
    "one head": (lambda a: a.heads > 1, "proved for one head, the layer has {heads}"),
    "not causal": (lambda a: a.causal, "proved without a mask, the layer is causal"),
    "no window": (lambda a: a.window is not None, "not proved for a window"),
    "no soft-cap": (lambda a: a.softcap is not None, "not proved for soft-capped logits"),
    "no logit bias": (lambda a: a.bias is not None, "not proved for a logit bias"),
    "no padding": (lambda a: a.attention_mask is not None, "the number of real tokens varies with the sequence"),
    "no biases of logits": (
        lambda a: a.b_q is not None or a.b_k is not None,
        "proved for queries and keys linear in the tokens, the layer adds biases",
    ),
    "no biases of values": (lambda a: a.b_v is not None, "proved for values linear in the tokens, the layer adds a bias"),
    "no phases": (lambda a: a.rotary is not None, "needs one A for all positions: not for rotary phases"),
    "no norms": (
        lambda a: a.q_norm is not None or a.k_norm is not None,
        "needs queries and keys affine in the tokens: not for norms on them",
    ),
}


def unmet(attn: Attention, *needs: str) -> str | None:
    """Why a theorem says nothing of a layer: the first of its needs that is not met; None where all are.

    >>> import torch
    >>> unmet(Attention.from_matrices(torch.eye(2), torch.eye(2)), "one head", "no window", *BILINEAR) is None
    True
    """
    return next((said.format(heads=attn.heads) for broken, said in map(_NEEDS.__getitem__, needs) if broken(attn)), None)
