"""Scaled dot-product attention as torch spells it, differentiable in every mode: a drop-in for torch's own function."""

import math
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

from howsmooth.errors import BadInputError
from howsmooth.kernels.autograd import ATTEND
from howsmooth.kernels.base import Keys, Outputs, Queries, Scores, Values, logits_of, masked_logits, plain_attention
from howsmooth.kernels.kinds import Softmax
from howsmooth.kernels.tensors import REAL, described
from howsmooth.parallel import active, attention_over
from howsmooth.settings import flag, number, shown, whole

_NONE = "leave it out for none"
_LONGEST = 2**31  # tokens
_SOFTMAX = Softmax()
# causal, scale, grouped heads, window, soft-cap, dropout and its seed
_How = tuple[bool, float, bool, int | None, float | None, float, Tensor | None]


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`softmax(scale · query keyᵀ + mask) value`, as `torch.nn.functional.scaled_dot_product_attention` gives it.

    Every derivative that torch knows goes through it up to the second, in O(n) memory: `backward`, `torch.func.jvp`, `vjp`,
    `jacfwd`, `jacrev`, `hessian`, `vmap`, dual numbers, and one over the other. A third derivative raises. A mask that is
    itself differentiated takes the plain formula, in O(n²) memory. Queries without a visible key give zero.

    Args:
        query: (…, n, d).
        key: (…, m, d). Axes in front broadcast.
        value: (…, m, d_v).
        attn_mask: broadcasts to (…, n, m); true where a key is visible, or a number added to the logit.
        dropout_p: the probability with which a weight is left out, below 1. Which ones follows from a seed that is drawn from
            torch's generator of the CPU at each call, so all derivatives are of the same function. It runs on tiles.
        is_causal: query `i` attends to keys `j ≤ i`, counted from the first of each.
        scale: of the logits, `1/√d` by default.
        enable_gqa: the third axis from the end holds heads, and several of the query's share one of the key's and value's.
        window: `|i − j| < window` is visible.
        softcap: logits `s` become `softcap · tanh(s / softcap)` before the mask.

    Returns:
        (…, n, d_v), in the precision of the inputs.

    >>> q, k, v, t = torch.eye(4).expand(4, 1, 2, 4, 4)
    >>> out, tangent = torch.func.jvp(lambda q: sdpa(q, k, v, is_causal=True), (q,), (t,))
    >>> out.shape, tangent.shape
    (torch.Size([1, 2, 4, 4]), torch.Size([1, 2, 4, 4]))
    """
    # a compiler can follow plain values, and has nothing else
    is_causal = is_causal if isinstance(is_causal, bool) else flag(is_causal, "is_causal")
    enable_gqa = enable_gqa if isinstance(enable_gqa, bool) else flag(enable_gqa, "enable_gqa")
    _check_tensors(query, key, value, attn_mask)
    query, key, value, attn_mask = _cast(query, key, value, attn_mask)
    softcap = None if softcap is None else _real(softcap, "a positive softcap", above=0.0)
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or not 1 <= window < _LONGEST):
        window = whole(window, "a window of 1 or more whole tokens", _NONE, least=1, below=_LONGEST)
    _check(query, key, value)
    seed = None
    if dropout_p != 0 or not isinstance(dropout_p, int | float):
        dropout_p = number(dropout_p, "a dropout_p of at least 0 and below 1", "0 is for none", least=0.0, below=1.0)
        seed = torch.randint(2**62, (), device="cpu") if dropout_p > 0 else None
    usual = 1 / math.sqrt(query.shape[-1] or 1)
    scale = usual if scale is None else _real(scale, "a finite scale of the logits")

    how, at = (is_causal, scale, enable_gqa, window, softcap, dropout_p, seed), active()
    if at is None or at.size == 1:
        return _attention(query, key, value, attn_mask, 0, how)
    if seed is not None:
        raise BadInputError("expected dropout_p=0 inside context_parallel, got more; set the attention dropout to 0")
    return attention_over(at, partial(_attention, how=how), query, key, value, attn_mask)


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    softcap: float | None = None,
) -> Tensor:
    """Attention of documents that lie one behind the other, without padding: `torch.nn.attention.varlen.varlen_attn`.

    With every derivative of `sdpa`, in O(tokens) memory. The last query of a document stands at its last key.

    Args:
        query: (tokens, heads, d).
        key: (tokens of the keys, heads, d).
        value: (tokens of the keys, heads, d_v).
        cu_seq_q: where documents begin among the queries, and the number of queries: whole numbers from 0 on.
        cu_seq_k: the same of the keys, by default that of the queries.
        max_q: no document has more queries; without it their number is read off the device, which waits.
        max_k: no document has more keys.
        scale: of the logits, `1/√d` by default.
        window_size: (−1, −1) for all keys of a document, (−1, 0) for a causal mask, (w, 0) for a causal one of the last
            `w + 1` keys, (w, w) for keys no more than `w` away.
        enable_gqa: several of the query's heads share one of the key's and value's.
        softcap: as for `sdpa`.

    Returns:
        (tokens, heads, d_v). On a GPU where documents are not as described, which is not read back, it holds NaN.

    >>> q, k, v = torch.eye(3).expand(3, 1, 3, 3).transpose(1, 2)
    >>> varlen(q, k, v, torch.tensor([0, 1, 3]))[0, 0].tolist()
    [1.0, 0.0, 0.0]
    """
    enable_gqa = enable_gqa if isinstance(enable_gqa, bool) else flag(enable_gqa, "enable_gqa")
    _check_tensors(query, key, value, None)
    query, key, value = _cast(query, key, value)
    got = f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 3:
        raise BadInputError(f"expected query, key and value as (tokens, heads, width), got {got}; pack the documents")
    at = active()
    if at is not None and at.size > 1:
        raise BadInputError("expected sdpa inside context_parallel, got varlen; give whole documents to each process")
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    _check(q, k, v)
    lead = _lead(q.shape, k.shape, v.shape, enable_gqa)
    if lead != q.shape[:2]:
        raise BadInputError(f"expected keys with no more heads than queries, got {got}; give as many queries")
    k, v = _key_heads(k, v, lead, enable_gqa)
    causal, window = _window_of(window_size)
    scale = 1 / math.sqrt(q.shape[-1] or 1) if scale is None else _real(scale, "a finite scale of the logits")
    softcap = None if softcap is None else _real(softcap, "a positive softcap", above=0.0)
    queries = _document_sizes(cu_seq_q, "cu_seq_q", q, max_q)
    keys = _document_sizes(cu_seq_q if cu_seq_k is None else cu_seq_k, "cu_seq_k", k, max_k)
    if queries[0].shape != keys[0].shape:
        raise BadInputError(
            f"expected as many documents among the keys as among the queries, got {len(keys[0])} and {len(queries[0])}; "
            "correct cu_seq_k"
        )
    if 0 in (*q.shape[:-1], *v.shape):
        return ((q * 0) @ _repeat(k, q.shape[1]).mT @ _repeat(v, q.shape[1]))[0].transpose(0, 1)
    documents = torch.cat([queries[0], keys[0]], 1).masked_fill((queries[2] | keys[2])[:, None], 0)
    longest_first = (documents[:, 1].long() * documents[:, 3]).argsort(descending=True)
    how = scale, softcap, causal, window, 0, documents[longest_first], queries[1], keys[1], 0.0, None
    return ATTEND(q, k, v, None, *how)[0][0].transpose(0, 1)


def _window_of(size: Any) -> tuple[bool, int | None]:
    """Whether keys behind a query are hidden, and the window, of how many keys torch shows on the left and on the right."""
    if isinstance(size, tuple | list) and len(size) == 2 and all(type(s) is int and -1 <= s < _LONGEST - 1 for s in size):
        left, right = size
        window = None if left == -1 else left + 1
        if right in (0, left):
            return right == 0, window
    raise BadInputError(
        f"expected window_size as (-1, -1), (-1, 0), (w, 0) or (w, w), got {shown(str(size))}; use sdpa with a mask for others"
    )


def _document_sizes(cu: Any, name: str, tokens: Tensor, most: Any) -> tuple[Tensor, int, Tensor]:
    """Where documents begin and how many tokens each has, (documents, 2), a length that none passes, and which are wrong.

    What lies on a GPU is not read back: there wrong documents are left out, and their tokens give NaN.
    """
    n, fix = tokens.shape[-2], "count tokens from 0 on, one number more than documents"
    if not isinstance(cu, Tensor) or cu.dtype not in (torch.int32, torch.int64) or cu.ndim != 1 or len(cu) < 2:
        raise BadInputError(f"expected {name} as a row of whole numbers, got {described(cu)}; {fix}")
    if most is not None and not isinstance(most, torch.SymInt):
        most = whole(most, "a length that no document passes", "leave it out to have it read", below=_LONGEST)
    if cu.device.type == "cpu" and not torch.compiler.is_compiling():
        ends = cu.tolist()
        lengths = [b - a for a, b in pairwise(ends)]
        if ends[0] != 0 or ends[-1] != n or min(lengths) < 0:
            raise BadInputError(f"expected {name} that grows from 0 to {n} tokens, got {shown(str(ends))}; {fix}")
        if most is not None and max(lengths) > most:
            raise BadInputError(f"expected no document over {most} tokens, got one of {max(lengths)}; correct max_{name[-1]}")
    ends = cu.to(tokens.device, torch.int32)
    sizes = ends.diff()
    most = int(sizes.max().clamp(0, n)) if most is None else most
    wrong = (sizes > most) | (ends[0] != 0) | (ends[-1] != n) | (sizes < 0).any()
    return torch.stack([ends[:-1], sizes], 1), most, wrong


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, first: int, how: _How) -> Tensor:
    """Attention of queries that stand at `first` and on among the keys."""
    causal, scale, grouped, window, softcap, dropout, seed = how
    lead = _lead(query.shape, key.shape, value.shape, grouped)
    n, m, d_v = query.shape[-2], *value.shape[-2:]
    if mask is not None:
        _check_mask(mask, query, (*lead, n, m), causal)
    q, k, v = query, key, value
    if not (q.ndim == 4 and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]):
        q = _four(_wide(query, lead), grouped)
        k, v = _key_heads(key, value, lead, grouped)
    bias = None if mask is None else _bias(mask, query.dtype, lead, m, grouped)
    learned = None if mask is None or mask.dtype == torch.bool or not _moves(mask) else bias
    if 0 in (n, m, d_v, *lead):  # nothing to attend to: zeros, with a graph
        out = (q * 0) @ _repeat(k, q.shape[1]).mT @ _repeat(v, q.shape[1])
        out = out if learned is None else out + 0 * learned.sum()
    elif learned is not None:
        if seed is not None:
            raise BadInputError("expected dropout_p=0 beside a mask that is differentiated, got more; detach the mask")
        out = _plain(q, _repeat(k, q.shape[1]), _repeat(v, q.shape[1]), learned, scale, softcap, window, first)
    else:
        out = ATTEND(q, k, v, bias, scale, softcap, causal, window, first, None, 0, 0, dropout, seed)[0]
    return out if len(lead) == 2 else out.reshape(*lead, n, d_v)


def attend(q: Queries, k: Keys, v: Values, scores: Scores) -> Outputs:
    """Attention with heads in place and a mask by rule; kinds other than softmax take the plain formula, in O(n²) memory.

    >>> x = torch.eye(2)[None, None]
    >>> attend(0 * x, x, x, Scores(1.0))[0, 0].tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    mask = scores.mask
    if not scores.softmax:
        return plain_attention(q, k, v, scores)
    if mask.ends is not None:
        raise BadInputError("expected a mask by order, got one by positions; use kernels.linearize")
    batch, heads, n, _ = q.shape
    mask.check(batch, heads, n, k.shape[2])
    bias = mask.bias
    if mask.keys is not None:
        hidden = torch.zeros_like(mask.keys, dtype=q.dtype).masked_fill(~mask.keys, -torch.inf)[:, None, None]
        bias = hidden if bias is None else bias + hidden
    return ATTEND(q, k, v, bias, scores.scale, scores.softcap, mask.causal, mask.window, mask.first, None, 0, 0, 0.0, None)[0]


def _cast(*tensors: Tensor | None) -> tuple:
    """What autocast makes of them."""
    first = tensors[0]
    if not isinstance(first, Tensor) or first.is_meta or not torch.is_autocast_enabled(first.device.type):
        return tensors
    kind = torch.get_autocast_dtype(first.device.type)
    return tuple(
        t.to(kind) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )


def _moves(t: Tensor) -> bool:
    """Whether a derivative in it is being taken."""
    return t.requires_grad or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None)


def _lead(q: torch.Size, k: torch.Size, v: torch.Size, grouped: bool) -> tuple[int, ...]:
    """The axes in front of tokens and widths, broadcast; with grouped heads, those of the query."""
    last = -2
    if grouped:
        _check_groups(q, k, v)
        last = -3
    lead = q[:last]
    if not lead == k[:last] == v[:last]:
        if not broadcasts((lead, k[:last], v[:last])):
            got = f"{tuple(q)}, {tuple(k)} and {tuple(v)}"
            hint = "set enable_gqa=True for grouped heads" if not grouped else "use 1 for an axis they share"
            raise BadInputError(f"expected batch axes that broadcast, got shapes {got}; {hint}")
        lead = torch.broadcast_shapes(lead, k[:last], v[:last])
    return (*lead, *q[last:-2])


def _wide(t: Tensor, lead: tuple[int, ...]) -> Tensor:
    return t if t.shape[:-2] == lead else t.expand(*lead, *t.shape[-2:])


def _four(t: Tensor, grouped: bool) -> Tensor:
    """(…, n, d) as (batch, heads, n, d); a third axis alone is a batch, unless heads are grouped."""
    if t.ndim == 3:
        return t[None] if grouped else t[:, None]
    return t if t.ndim == 4 else t[None, None] if t.ndim == 2 else t.flatten(0, -4)


def _key_heads(key: Tensor, value: Tensor, lead: tuple[int, ...], grouped: bool) -> tuple[Tensor, Tensor]:
    """Keys and values (batch, heads, m, width) with as many heads as each other; one for all where they broadcast over them."""
    if not grouped:
        shared = len(lead) > 1 and all(t.ndim < 3 or t.shape[-3] == 1 for t in (key, value))
        heads = (*lead[:-1], 1) if shared else lead
        return tuple(_four(_wide(t, heads), grouped) for t in (key, value))  # pyright: ignore
    heads = max(key.shape[-3], value.shape[-3])
    if key.shape[-3] != value.shape[-3] and heads % min(key.shape[-3], value.shape[-3]):
        heads = lead[-1]
    key, value = (_repeat(t, heads) for t in (key, value))
    return tuple(_four(_wide(t, (*lead[:-1], heads)), grouped) for t in (key, value))  # pyright: ignore


def _repeat(t: Tensor, heads: int) -> Tensor:
    return t if t.shape[-3] == heads else t.repeat_interleave(heads // t.shape[-3], dim=-3)


def _bias(mask: Tensor, dtype: torch.dtype, lead: tuple[int, ...], m: int, grouped: bool) -> Tensor:
    """What a mask adds to the logits, (1 or batch, 1 or heads, 1 or n, m)."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)
    mask = mask.reshape(*(1,) * (len(lead) + 2 - mask.ndim), *mask.shape)
    mask = mask.expand(*mask.shape[:-1], m)
    if any(size != 1 for size in mask.shape[:-3]):
        mask = mask.expand(*lead[:-1], *mask.shape[-3:])
    return _four(mask, grouped)


def _plain(q, k, v, bias: Tensor, scale: float, softcap: float | None, window: int | None, first: int) -> Tensor:
    """The plain formula for a mask that is differentiated."""
    i, j = (torch.arange(t.shape[-2], device=q.device) for t in (q, k))
    visible = (first + i[:, None] - j).abs() < (_LONGEST if window is None else window)
    s, visible = masked_logits(logits_of(q, k, None, scale, softcap), bias, visible)
    return _SOFTMAX.weigh(s, visible, s[..., :1]) @ v


def _real(value: Any, expected: str, above: float = -math.inf) -> float:
    """A finite number, which a compiler may only know by name."""
    if isinstance(value, torch.SymFloat) or (isinstance(value, float) and above < value < math.inf):
        return value  # pyright: ignore[reportReturnType]
    return number(value, expected, _NONE, above=above)


def _check_tensors(query: Any, key: Any, value: Any, mask: Any) -> None:
    """Refuse what is no tensor with rows and columns."""
    for t, name in ((query, "query"), (key, "key"), (value, "value")):
        if not _dense(t) or t.dtype not in REAL or t.ndim < 2:
            raise BadInputError(
                f"expected {name} as a floating-point tensor (…, tokens, width), got {described(t)}; convert it"
            )
    if mask is not None and not _dense(mask):
        kind = "a boolean or floating-point tensor (…, tokens, width)"
        raise BadInputError(f"expected attn_mask as {kind}, got {described(mask)}; convert it")


def _dense(t: Any) -> bool:
    return (
        isinstance(t, Tensor) and not isinstance(t, UninitializedTensorMixin) and not t.is_nested and t.layout is torch.strided
    )


def _check(query, key, value) -> None:
    """Refuse what torch's function refuses."""
    q, k, v = query.shape, key.shape, value.shape
    if not query.dtype == key.dtype == value.dtype:
        got = ", ".join(str(t.dtype) for t in (query, key, value))
        raise BadInputError(f"expected query, key and value of one dtype, got {got}; convert them")
    if not query.device == key.device == value.device:
        got = ", ".join(str(t.device) for t in (query, key, value))
        raise BadInputError(f"expected query, key and value on one device, got {got}; move them")
    if q[-1] != k[-1] or k[-2] != v[-2]:
        raise BadInputError(
            f"expected query (…, n, d), key (…, m, d) and value (…, m, d_v), got {tuple(q)}, {tuple(k)} and {tuple(v)}; "
            "transpose so that tokens come before widths"
        )


def _check_groups(q, k, v) -> None:
    if min(len(q), len(k), len(v)) < 3:
        got = f"{tuple(q)}, {tuple(k)} and {tuple(v)}"
        raise BadInputError(f"expected an axis of heads with enable_gqa, got shapes {got}; add one before the tokens")
    if not k[-3] or not v[-3] or q[-3] % k[-3] or q[-3] % v[-3]:
        raise BadInputError(
            f"expected key and value heads that divide the query's {q[-3]}, got {k[-3]} and {v[-3]}; change the number of heads"
        )


def broadcasts(shapes) -> bool:
    """Whether axes are equal or 1, counted from the last."""
    for axis in range(1, 1 + max(len(shape) for shape in shapes)):
        sizes = {shape[-axis] for shape in shapes if axis <= len(shape) and shape[-axis] != 1}
        if len(sizes) > 1:
            return False
    return True


def _check_mask(mask, query: Tensor, whole: tuple[int, ...], causal: bool) -> None:
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise BadInputError(f"expected attn_mask as a boolean or {query.dtype} tensor, got {described(mask)}; convert it")
    if causal:
        raise BadInputError("expected either attn_mask or is_causal, got both; write the causal part into attn_mask")
    if mask.device != query.device:
        raise BadInputError(f"expected attn_mask on {query.device}, got {mask.device}; move it")
    short = tuple(mask.shape)[::-1]
    if mask.ndim > len(whole) or any(a not in (1, b) for a, b in zip(short, whole[::-1], strict=False)):
        raise BadInputError(
            f"expected attn_mask that broadcasts to {whole}, got {tuple(mask.shape)}; use 1 for an axis it shares"
        )
