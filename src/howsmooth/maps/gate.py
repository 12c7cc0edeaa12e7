"""What an attention layer may be: its weights, heads, masks, norms and phases checked, and defaults filled in."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels import Mask, Scores
from howsmooth.kernels.kinds.kind import check_kind
from howsmooth.kernels.tensors import check_dense, check_tensor, described
from howsmooth.maps.base import Map
from howsmooth.maps.norms import LayerNorm, RMSNorm
from howsmooth.maps.rotary import Rotary
from howsmooth.settings import flag, number, whole

if TYPE_CHECKING:
    from howsmooth.maps.attention import Attention


def check_layer(attn: "Attention") -> None:
    """Refuse a layer whose parts do not fit, and hand its settings on as the package has them."""
    check_kind(attn.kind)
    fix = "take it from the model's configuration"
    heads = whole(attn.heads, "a whole number of heads, at least 1", fix, least=1)
    kv_heads = heads if attn.kv_heads is None else attn.kv_heads
    kv_heads = whole(kv_heads, "a whole number of kv_heads, at least 1", fix, least=1)
    if heads % kv_heads:
        raise BadInputError(f"expected kv_heads that divide the {heads} heads, got {kv_heads}; {fix}")
    fill(attn, heads=heads, kv_heads=kv_heads)
    _check(attn, "w_q", "out", "in")
    if attn.kind.traits.tied:
        _tie(attn)
    _check(attn, "w_k", "out", attn.width)
    _check(attn, "w_v", "out", attn.width)
    q_rows, k_rows, v_rows = attn.w_q.shape[0], attn.width if attn.w_k is None else attn.w_k.shape[0], attn.w_v.shape[0]
    for name, rows, parts in (("w_q", q_rows, heads), ("w_k", k_rows, kv_heads), ("w_v", v_rows, kv_heads)):
        if rows % parts:
            raise BadInputError(
                f"expected heads that divide the rows of {name}, got {parts} heads and {rows} rows; change heads or {name}"
            )
    if attn.head_width != k_rows // kv_heads:
        raise BadInputError(
            f"expected queries and keys of one head width, got {attn.head_width} and {k_rows // kv_heads}; "
            "check heads and kv_heads"
        )
    if attn.head_width % attn.kind.parts:
        raise BadInputError(
            f"expected heads whose width is even for {attn.kind!r}, got {attn.head_width}; it halves queries and keys"
        )
    _check(attn, "w_o", "out", v_rows // kv_heads * heads)
    for name, size in (("b_q", q_rows), ("b_k", k_rows), ("b_v", v_rows), ("b_o", attn.out_width)):
        _check(attn, name, size)
    scale = attn.kind.scale(attn.part_width) if attn.scale is None else attn.scale
    cap, window = attn.softcap, attn.window
    none = "leave it out for none"
    fill(
        attn,
        scale=number(scale, "a finite scale", "the usual value is 1/√(head width)"),
        softcap=None if cap is None else number(cap, "a finite, positive soft-cap", none, above=0.0),
        causal=flag(attn.causal, "causal"),
        window=None if window is None else whole(window, "a window of 1 or more whole tokens", none, least=1),
    )
    attn.kind.check_layer(heads, attn.scale)
    if attn.bias is not None or attn.attention_mask is not None:
        _check_masks(attn)
    Scores(attn.scale, attn.softcap, Mask(attn.causal, attn.window, None, attn.bias), attn.kind)  # refuses what does not fit
    if any(part is not None for part in (attn.q_norm, attn.k_norm, attn.rotary)):
        _check_turn(attn)


def fill(attn: "Attention", **values: Any) -> None:
    """Settings as the gate hands them on."""
    for name, value in values.items():
        object.__setattr__(attn, name, value)


def _tie(attn: "Attention") -> None:
    """Keys of L2 attention that are its queries."""
    tied = attn.w_k is None or (attn.w_k.shape == attn.w_q.shape and bool((attn.w_k == attn.w_q).all()))
    if not tied or (attn.b_k is not None and (attn.b_q is None or not bool((attn.b_k == attn.b_q).all()))):
        raise BadInputError("expected w_k and b_k like w_q and b_q for L2(tied=True), got others; leave them out")
    if attn.heads != attn.kv_heads or attn.q_norm is not None or attn.k_norm is not None:
        got = "kv_heads" if attn.heads != attn.kv_heads else "q_norm or k_norm"
        raise BadInputError(f"expected as many keys as queries, and no norms on them, for L2(tied=True), got {got}; use L2()")
    fill(attn, w_k=attn.w_q, b_k=attn.b_q)


def _check(attn: "Attention", name: str, *axes: str | int) -> None:
    """Refuse a weight or bias that does not fit; queries and values must have their weights."""
    t = getattr(attn, name)
    if t is not None or name in ("w_q", "w_v"):
        fix = "pass nn.Linear's weight, (out, in)" if len(axes) == 2 else "pass nn.Linear's bias"
        check_tensor(t, name, axes, fix)


def _check_turn(attn: "Attention") -> None:
    """Norms and phases must fit the width of a head, or norms that of all heads."""
    head, q_full, k_full = attn.part_width, attn.heads * attn.head_width, attn.kv_heads * attn.head_width
    for name, norm, full in (("q_norm", attn.q_norm, q_full), ("k_norm", attn.k_norm, k_full)):
        if norm is not None and not (isinstance(norm, LayerNorm | RMSNorm) and norm.width in (head, full)):
            raise BadInputError(
                f"expected {name} as a LayerNorm or RMSNorm of howsmooth over the head width {head} or over all heads, "
                f"{full}, got {_named(norm)}; it normalises every head by itself or all of them together"
            )
    if attn.rotary is not None and not (isinstance(attn.rotary, Rotary) and attn.rotary.width <= head):
        raise BadInputError(
            f"expected rotary as a Rotary that turns at most the head width {head}, got {_named(attn.rotary)}; "
            "cos and sin have one column per plane, not per entry"
        )


def _check_masks(attn: "Attention") -> None:
    if attn.bias is not None:
        fix = "use 1 for an axis it does not depend on"
        check_tensor(attn.bias, "bias", ("batch", "heads", "n", "m"), fix, finite=False)
    mask = attn.attention_mask
    if mask is not None:
        check_dense(mask, "attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.is_floating_point() or mask.is_complex():
            raise BadInputError(
                f"expected attention_mask as a boolean or integer tensor (batch, n), got {described(mask)}; "
                "give one row per sequence"
            )
        mask = mask.bool()
        object.__setattr__(attn, "attention_mask", mask)
        if not bool(mask.any(-1).all()):
            raise BadInputError(
                "expected a real token in every sequence, got an attention_mask with an empty row; leave that sequence out"
            )


def _named(part: object) -> str:
    """A norm or phases of ours as they show themselves, anything else by its type."""
    return repr(part) if isinstance(part, Map | Rotary) else type(part).__name__
