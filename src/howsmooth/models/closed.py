"""Layers of a model as `howsmooth.Attention`, where they are that: one attention call, one projection behind."""

from weakref import WeakSet

import torch

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.models.model_input import ATTENTION, ModelInput
from howsmooth.program.closed import as_attention

_MOST = 2**31  # bytes of weights kept, the latest layers'
# Relative to the largest entry: what float32 constants inside a model explain, and no lost key, window or soft-cap.
_SAME = {torch.float64: 1e-5, torch.float32: 1e-3}


class ClosedForms:
    """Layers of one model in closed form, each read off once, at its longest input so far.

    An input of the same length or shorter finds the same function, unless its output there says otherwise (packed documents of
    one length have masks of their own); a longer one is read off anew, since a mask may hide something from it that it hid from
    none before.
    """

    def __init__(self):
        # by layer: the length it was read off at, and the inputs where it is known to fit
        self._kept: dict[int, tuple[int, Attention | None, WeakSet[ModelInput]]] = {}

    def of(self, sample: ModelInput, layer: int) -> Attention | None:
        """A layer in the precision of the measurement, or nothing where it is not of this form."""
        if sample.real is not None or not sample.layers.found[layer].groups:
            return None
        count = len(sample.segment(layer).start)
        n, attn, fitting = self._kept.get(layer, (0, None, WeakSet[ModelInput]()))
        if n < count or (attn is not None and sample not in fitting and not _fits(attn, sample, layer)):
            attn, fitting = _read(sample, layer), WeakSet[ModelInput]()
            self._kept.pop(layer, None)
            self._kept[layer] = count, attn, fitting
            while len(self._kept) > 1 and sum(a.nbytes for _, a, _ in self._kept.values() if a is not None) > _MOST:
                del self._kept[next(iter(self._kept))]
        fitting.add(sample)
        return attn


def closed_form(sample: ModelInput, layer: int) -> Attention:
    """A layer in float64; refused where it is not of this form."""
    if sample.real is not None:
        raise BadInputError("expected an input without padding, got a padded one; leave the padding out")
    sample.check(layer, ATTENTION)
    return as_attention(sample.run.program, sample.ends(layer, ATTENTION), sample.run.at(torch.float64).values)


def _read(sample: ModelInput, layer: int) -> Attention | None:
    try:
        return closed_form(sample, layer).to(sample.work)
    except BadInputError:
        return None


@torch.no_grad()
def _fits(attn: Attention, sample: ModelInput, layer: int) -> bool:
    """Whether a layer in closed form gives what the recorded layer gives at this input."""
    segment = sample.segment(layer)
    if attn.bias is not None and attn.bias.shape[-1] != len(segment.start):  # a bias belongs to one length
        return False
    x = segment.start.to(attn.dtype)[None]
    ours, theirs = attn.linearize(x)[0], segment.to(attn.dtype).value(x)
    return float((ours - theirs).abs().max()) <= _SAME[attn.dtype] * float(theirs.abs().max())
