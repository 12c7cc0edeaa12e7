"""Is that large? What the constant of a layer is set against: the same layer as an average, random changes, and its logits."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from howsmooth.maps import Attention, AttentionJacobian, Map
from howsmooth.models import Capture, Measurement
from howsmooth.solve import linear
from howsmooth.spectral import GaussianProbes, probed_gains
from howsmooth.study.jobs import Cells, EstimateRow
from howsmooth.study.question import Beside, Question
from howsmooth.study.scope import Part, Setting
from howsmooth.verbs import lipschitz

HIGH = 30.0  # logits above which softmax is a choice, and low precision rounds it
_ROUGH = 1e-3  # relative accuracy of a yardstick


@final
@dataclass(frozen=True, kw_only=True)
class YardstickRow(EstimateRow):
    """Yardsticks of a layer on the first sample, beside its constant (`value`).

    averaging: `‖W_o W_v‖`, the constant of the layer if every token looked at all tokens alike; nothing where it has no such
    form.  gain: `‖J‖_F / √N`, as in `howsmooth.gain`.  logits: the largest one.
    high_heads: those with logits above 30.
    """

    kind = "yardstick"
    averaging: float | None = None
    gain: float | None = None
    logits: float | None = None
    high_heads: Sequence[int] = ()


def yardstick_row(captured: Capture, m: Measurement, part: Part, window: Cells) -> Iterator[YardstickRow]:
    """One row for a layer."""
    began, attn = time.perf_counter(), captured.closed(m.layer) if part.map == "attention" else None
    f: Map = captured.map(m.layer, part.map) if attn is None else attn
    x = captured.tokens(m.layer, part.map)
    logits = None if m.logits is None else m.logits[1]
    high = high_heads(attn, x) if attn is not None and logits is not None and logits > HIGH else []
    direction = m.direction.to(x.device, torch.float64)[None]
    (gain,) = probed_gains(linear(f, x), [m.estimate], direction, GaussianProbes(), [0.0])
    more = {"averaging": averaging(attn), "gain": gain.value, "logits": logits, "high_heads": high}
    yield YardstickRow.measured(m, window, **more, seconds=time.perf_counter() - began)


def averaging(attn: Attention | None) -> float | None:
    """`‖W_o W_v‖` of softmax attention, all heads together."""
    if attn is None or not attn.kind.traits.softmax:
        return None
    w = attn.by_head()
    whole = torch.einsum("hov,hvd->od", w.o, w.v)
    return lipschitz(lambda x: x @ whole.mT, whole.new_zeros(1, attn.width), tol=_ROUGH).value


def high_heads(attn: Attention, x: torch.Tensor) -> list[int]:
    """Heads that have a logit above 30."""
    heads = []
    for head in range(attn.heads):
        jacobian = linear(attn.head(head), x)
        if isinstance(jacobian, AttentionJacobian) and jacobian.kernel.logit_range()[1] > HIGH:
            heads.append(head)
    return heads


def _lengths(setting: Setting) -> list[int]:
    return [] if setting.scope.map == "model" else [setting.longest]


YARDSTICKS = Question(name="yardsticks", row=YardstickRow, beside=Beside(yardstick_row, _lengths))
