"""Layers of a model as `howsmooth.Attention`, where they are that: one attention call, one projection behind."""

import warnings
from collections.abc import Callable
from weakref import WeakKeyDictionary, ref

import torch

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention, Rotary
from howsmooth.maps.operator import drawn, stream
from howsmooth.models.cut import Cut
from howsmooth.models.intercept import UncuttableError
from howsmooth.models.reading import FORMULA, Stage, agree, off, read_projection, read_sides
from howsmooth.models.sample import FallbackWarning, Sample, same

_MOST = 2**31  # bytes of weights kept, the latest layers'


class ClosedForms:
    """Layers of one model in closed form, each read off once, at its longest input so far.

    An input of the same length or shorter finds the same function, unless its output there says otherwise (packed documents of
    one length have masks of their own); a longer one is read off anew, since a mask may hide something from it that it hid from
    none before.
    """

    def __init__(self):
        self._kept: dict[int, tuple[int, Attention | None]] = {}  # by layer, with the length it was read off at
        # by layer, what an input was given, in references that keep no weights
        self._tried: WeakKeyDictionary[Sample, dict[int, Callable[[], Attention | None]]] = WeakKeyDictionary()

    def of(self, sample: Sample, layer: int) -> Attention | None:
        """A layer in the precision of the measurement, or nothing where it is not of this form."""
        x = sample.trace.layers[layer].x
        if sample.real is not None:
            return None
        n, attn = self._kept.get(layer, (0, None))
        tried = self._tried.setdefault(sample, {})
        untried = n >= len(x) and attn is not None and tried.get(layer, _nothing)() is not attn
        if n < len(x) or (attn is not None and untried and not _fits(attn, sample, layer)):
            n, attn = len(x), self._read(sample, layer)
            self._kept.pop(layer, None)
            self._kept[layer] = n, attn
            while len(self._kept) > 1 and sum(a.nbytes for _, a in self._kept.values() if a is not None) > _MOST:
                del self._kept[next(iter(self._kept))]
        tried[layer] = _nothing if attn is None else ref(attn)
        return attn

    def _read(self, sample: Sample, layer: int) -> Attention | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            try:
                return as_attention(sample.map(layer)).to(sample.work)
            except BadInputError:
                return None


def _nothing() -> None:
    """A reference to no layer."""


@torch.no_grad()
def _fits(attn: Attention, sample: Sample, layer: int) -> bool:
    """Whether a layer in closed form gives what the cut layer gives at this input."""
    cut = sample.cut(layer, "attention")
    if cut is None or (attn.bias is not None and attn.bias.shape[-1] != cut.start.shape[-2]):  # a bias belongs to one length
        return False
    x = cut.start.to(attn.dtype)
    return same(attn.linearize(x[None])[0], cut.value(x[None]))


@torch.no_grad()
def as_attention(cut: Cut) -> Attention:
    """The closed form of an `attention` map, read off the model (`howsmooth.models.reading`), in float64.

    The result must give the layer's own queries, keys and values at its own input to 1e-9, and what the layer makes of heads'
    outputs; the mask is that of the call. Gates, norms of another kind and anything else that is not this formula are refused.
    """
    layer = cut.layer
    kind = type(layer.module).__name__
    if not cut.kernels or layer.heads == 0:
        raise BadInputError(f"expected a layer with one attention call on the kernels, got {kind}; measure it instead")
    if cut.real is not None:
        raise BadInputError("expected an input without padding, got a padded one; leave the padding out")
    cut = cut.to(torch.float64)
    try:
        stage = Stage(cut)
    except UncuttableError as error:
        raise BadInputError(f"expected logits that are products of queries and keys, got {error}; measure it instead") from None
    attn = _formula(stage)
    error = max(*_off_before(attn, stage), _off_behind(attn, stage))
    if not error <= FORMULA:
        raise BadInputError(
            f"expected a layer of affine, normalised or turned queries and keys and affine values, got {kind}, "
            f"off by {error:.1e} (gates, other norms); measure it instead"
        )
    return attn


def _formula(stage: Stage) -> Attention:
    """The layer that the module seems to be."""
    scores, mask = stage.call.scores, stage.call.scores.mask
    if mask.keys is not None or mask.ends is not None:
        raise BadInputError("expected an input without padding, got a mask that hides tokens; leave them out")
    w_o, b_o = read_projection(stage)
    q, k, v = read_sides(stage)
    turned = k.rotary if q.rotary is None else q.rotary
    if turned is not None and not (q.rotary and k.rotary and _alike(q.rotary, k.rotary)):
        raise BadInputError("expected the same phases on queries and keys, got others; measure the layer instead")
    if v.norm is not None or v.rotary is not None:
        raise BadInputError("expected values that are affine in the tokens, got norms or phases on them; measure the layer")
    (w_q, b_q), (w_k, b_k), (w_v, b_v) = (side.matrix for side in (q, k, v))
    b_q, b_k, b_v, b_o = (b if bool(b.any()) else None for b in (b_q, b_k, b_v, b_o))
    return Attention(
        w_q,
        w_k,
        w_v,
        w_o.contiguous(),
        heads=q.heads,
        kv_heads=k.heads,
        b_q=b_q,
        b_k=b_k,
        b_v=b_v,
        b_o=b_o,
        scale=scores.scale,
        softcap=scores.softcap,
        causal=mask.causal,
        window=mask.window,
        bias=mask.bias,
        q_norm=q.norm,
        k_norm=k.norm,
        rotary=turned,
        kind=scores.kind,
    )


def _alike(a: Rotary, b: Rotary) -> bool:
    return a.interleaved == b.interleaved and a.cos.shape == b.cos.shape and agree(a.cos, b.cos) and agree(a.sin, b.sin)


def _off_before(attn: Attention, stage: Stage) -> list[float]:
    """How far queries, keys and values are from those of the call, relative to the largest entry."""
    call = stage.call
    group = call.k.shape[1] // attn.kv_heads
    ours = attn.vectors(stage.x[None])
    theirs = (call.q, call.k[:, ::group], call.v[:, ::group])
    same_heads = [t.repeat_interleave(group, 1) for t in theirs[1:]]
    return [off(a, b) for a, b in zip(ours, theirs, strict=True)] + [
        off(a, b) for a, b in zip(same_heads, (call.k, call.v), strict=True)
    ]


def _off_behind(attn: Attention, stage: Stage) -> float:
    """How far the layer is from its output projection behind attention that gives random numbers."""
    call = stage.call
    shape = (*call.q.shape[:3], call.v.shape[-1])
    given = drawn(shape, stream(0, "outputs of heads", stage.x.device), torch.float64)
    return off(attn.finish(given)[0], stage.cut.through(stage.x, lambda _: given))
