"""Layers of a model as `howsmooth.Attention`, where they are that: affine queries, keys and values, one projection behind."""

import warnings
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import functional_call

from howsmooth.errors import BadInputError
from howsmooth.kernels import SoftmaxAttention
from howsmooth.maps import Attention
from howsmooth.models.cut import Cut
from howsmooth.models.sample import FORMULA, FallbackWarning, Sample, same

_WIDEST = 1024  # of the tokens; reading off the weights of a wider layer costs more than it saves
_MOST = 64  # layers kept


class ClosedForms:
    """Layers of one model in closed form, each read off once, at its longest input so far.

    A shorter input finds the same function, unless its output there says otherwise; a longer one is read off anew, since a
    mask may hide something from it that it hid from none before.
    """

    def __init__(self):
        self._kept: dict[int, tuple[int, Attention | None]] = {}  # by layer, with the length it was read off at
        self._tried: WeakKeyDictionary[Sample, dict[int, Attention | None]] = WeakKeyDictionary()  # what an input was given

    def of(self, sample: Sample, layer: int) -> Attention | None:
        """A layer in the precision of the measurement, or nothing where it is not of this form."""
        x = sample.trace.layers[layer].x
        if x.shape[-1] > _WIDEST or sample.real is not None:
            return None
        n, attn = self._kept.get(layer, (0, None))
        tried = self._tried.setdefault(sample, {})
        untried = n > len(x) and tried.get(layer) is not attn
        if n < len(x) or (attn is not None and untried and not _fits(attn, sample, layer)):
            n, attn = len(x), self._read(sample, layer)
            if len(self._kept) >= _MOST:
                self._kept.clear()
            self._kept[layer] = n, attn
        tried[layer] = attn
        return attn

    def _read(self, sample: Sample, layer: int) -> Attention | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            try:
                return as_attention(sample.map(layer)).to(sample.work)
            except BadInputError:
                return None


@torch.no_grad()
def _fits(attn: Attention, sample: Sample, layer: int) -> bool:
    """Whether a layer in closed form gives what the cut layer gives at this input."""
    cut = sample.cut(layer, "attention")
    if cut is None or attn.bias is not None:  # a bias belongs to one length
        return False
    x = cut.start.to(attn.dtype)
    return same(attn(x), cut.value(x[None])[0])


@torch.no_grad()
def as_attention(cut: Cut) -> Attention:
    """The closed form of an `attention` map, its weights read off its answers to unit vectors, in float64.

    `W` and `b` of queries, keys and values come from the tokens `0, e_1, …, e_d`, sent through as many at a time as the map
    takes. The result must give the layer's own output at its own input to 1e-9: rotary phases, norms on queries or keys,
    gates and anything else that is not this formula are refused.
    """
    layer = cut.layer
    kind = type(layer.module).__name__
    if not cut.kernels or layer.projection is None or layer.heads == 0:
        raise BadInputError(
            f"expected a layer with one attention call and one output projection, got {kind}; measure it, or bound its cut map"
        )
    if cut.real is not None:
        raise BadInputError("expected an input without padding, got a padded one; leave the padding out")
    cut = cut.to(torch.float64)
    x = cut.start.double()
    n, d = x.shape
    units = torch.cat([torch.zeros(1, d), torch.eye(d)]).to(x)
    answers: list[list[Tensor]] = [[], [], []]
    for start in range(0, d + 1, n):
        part = units[start : start + n]
        kernel = _only(cut.run(torch.cat([part, x[len(part) :]]))[1], kind)
        for gathered, t in zip(answers, kernel.inputs, strict=True):
            gathered.append(t[0, :, : len(part)].transpose(0, 1).flatten(1))  # (part, heads · width)
    wholes = [torch.cat(gathered) for gathered in answers]
    (b_q, b_k, b_v) = (whole[0] for whole in wholes)
    (w_q, w_k, w_v) = ((whole[1:] - whole[0]).mT.contiguous() for whole in wholes)
    value, kernels = cut.run(x)
    kernel = _only(kernels, kind)
    scores = kernel.scores
    state = {k: t.detach().double() for k, t in layer.projection.named_parameters()}
    o_width = layer.heads * kernel.output.shape[-1]
    b_o = functional_call(layer.projection, state, (x.new_zeros(1, o_width),))[0]
    w_o = (functional_call(layer.projection, state, (torch.eye(o_width, dtype=x.dtype, device=x.device),)) - b_o).mT
    attn = Attention(
        w_q,
        w_k,
        w_v,
        w_o.contiguous(),
        heads=layer.heads,
        kv_heads=kernel.inputs[1].shape[1],
        b_q=b_q,
        b_k=b_k,
        b_v=b_v,
        b_o=b_o,
        scale=scores.scale,
        softcap=scores.softcap,
        causal=scores.mask.causal,
        window=scores.mask.window,
        bias=scores.mask.bias,
    )
    if not same(attn(x), value, FORMULA):
        error = float((attn(x) - value).abs().max() / value.abs().max())
        raise BadInputError(
            f"expected a layer whose queries, keys and values are affine in its input, got {kind}, off by {error:.1e} "
            "(rotary phases, norms or gates); measure it instead"
        )
    return attn


def _only(kernels: list[SoftmaxAttention], kind: str) -> SoftmaxAttention:
    if len(kernels) != 1 or kernels[0].output.shape[0] != 1:
        raise BadInputError(f"expected a layer with one attention call over all tokens, got {kind}; measure it instead")
    return kernels[0]
