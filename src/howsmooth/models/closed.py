"""Layers of a model as `howsmooth.Attention` where they are that, and maps as pieces for bounds around an input."""

from collections.abc import Callable
from dataclasses import replace
from weakref import WeakSet

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention, Map
from howsmooth.models.model_input import ATTENTION, ModelInput, Which
from howsmooth.program import Ends
from howsmooth.program.calls import find_calls
from howsmooth.program.closed import as_attention
from howsmooth.program.pieces import Pieces, PiecesMap
from howsmooth.program.reading import WholeLayer, read
from howsmooth.program.segments import SegmentMap

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
    return as_attention(sample.run.at(torch.float64), sample.ends(layer, ATTENTION))


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


def in_pieces(sample: ModelInput, layer: int, which: Which, within: float = 0.0) -> Map:
    """A map in float64 that is made of known pieces: an attention layer, or operations around such layers.

    Attention layers are read off as `howsmooth.Attention` and taken whole. The pieces must give what the recorded run gives, at
    its input and beside it; what is not made of known pieces is refused.  within: how far tokens will move.
    """
    if which.map in ("cross", "context"):
        raise BadInputError(
            f"expected a map of self-attention for a neighbourhood, got {which.map!r}; measure it at the input, without within"
        )
    _check_whole(sample)
    sample.check(layer, which)
    if which.map in ("attention", "heads") and which.to is None:
        attn = closed_form(sample, layer)
        attn = replace(attn, w_o=None, b_o=None) if which.map == "heads" else attn
        return (attn if which.head is None else attn.head(which.head)).to("cpu", torch.float64)
    return PiecesMap(_pieces(sample, sample.ends(layer, which), which.head, within))


def to_the_end(sample: ModelInput, layer: int) -> tuple[Callable[[Tensor], Tensor], Callable[[], Pieces], Tensor]:
    """What a model makes of the tokens that enter one of its layers, (n, d) → rows of its output, in float64.

    Also a way to the same in pieces with attention layers taken whole, and the tokens.
    """
    _check_whole(sample)
    sample.check(layer, Which("block"))
    block = sample.ends(layer, Which("block"))
    ends = Ends(block.enter, block.flow.outputs[:1], block.flow)
    segment = SegmentMap(sample.run, ends, sample.name, work=torch.float64, precision="strict")
    return lambda t: segment.replayed(t).output, lambda: _pieces(sample, ends, None), segment.start.double()


def _pieces(sample: ModelInput, ends: Ends, head: int | None, within: float = 0.0) -> Pieces:
    inside = set(ends.flow.between(ends.enter, ends.leave))
    own_calls = {n for layer in sample.layers.found for group in layer.groups for n in group.outputs}
    if any(call.output in inside for call in find_calls(ends.flow) if call.output not in own_calls):
        raise BadInputError(
            "expected a map without cross-attention for a neighbourhood, got one with it; measure it at the input"
        )
    wholes: list[WholeLayer] = []
    for k, layer in enumerate(sample.layers.found):
        if not any(set(group.outputs) <= inside for group in layer.groups):
            continue
        if len(layer.groups) > 1:
            raise BadInputError(
                f"expected layers that attend once for a neighbourhood, got layer {k}, which attends {len(layer.groups)} "
                "times; measure it at the input"
            )
        own = sample.ends(k, ATTENTION)
        attn: Attention = closed_form(sample, k).to("cpu", torch.float64)
        wholes.append(WholeLayer(own.enter[0], own.leave[0], attn if head is None else attn.head(head)))
    own = SegmentMap(sample.run, ends, sample.name, head, work=torch.float64, precision="strict")
    return read(sample.run.program, ends, wholes, run=sample.run, truth=lambda t: own.replayed(t).output, within=within)


def _check_whole(sample: ModelInput) -> None:
    if sample.real is not None:
        raise BadInputError("expected an input without padding for a neighbourhood, got a padded one; leave the padding out")
    if sample.run.device.type != "cpu":
        raise BadInputError("expected a model on the CPU for a neighbourhood, got one on a GPU; move it with model.to('cpu')")
