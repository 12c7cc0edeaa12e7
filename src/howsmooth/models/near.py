"""Maps of a model as pieces that bounds around an input are known of: attention layers whole, all else piece by piece."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention, Map
from howsmooth.models.closed import closed_form
from howsmooth.models.model_input import ATTENTION, ModelInput, Which
from howsmooth.program import Ends
from howsmooth.program.calls import find_calls
from howsmooth.program.pieces import Pieces, PiecesMap
from howsmooth.program.reading import WholeLayer, read
from howsmooth.program.segments import SegmentMap


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
