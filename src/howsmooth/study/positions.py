"""Does a model's own table of positions break where its constants jump?"""

from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from howsmooth.models import Model

_NEAR = 2  # positions about a jump that count as there; tables of some models begin with rows for padding
_CLEAR = 2.0  # times the median step


@final
@dataclass(frozen=True)
class PositionBreak:
    """Embeddings of positions `position − 1` and `position`, counted from one, are `step` apart; the median is `typical`."""

    position: int
    step: float
    typical: float


@torch.no_grad()
def position_break(model: Model, before: int, after: int) -> PositionBreak | None:
    """The largest step between neighbouring learned positions about lengths `before … after`, if it stands out."""
    limit = getattr(getattr(model.module, "config", None), "max_position_embeddings", None)
    tables = [
        m.weight for name, m in model.module.named_modules() if isinstance(m, nn.Embedding) and _holds_positions(name, m, limit)
    ]
    if not tables:
        return None
    steps = tables[0].double().diff(dim=0).norm(dim=-1)  # steps[i]: between positions i + 1 and i + 2, counted from one
    first, last = max(0, before - 2 - _NEAR), min(len(steps), after + _NEAR)
    if first >= last:
        return None
    top = first + int(steps[first:last].argmax())
    typical = float(steps.median())
    step = float(steps[top])
    return PositionBreak(top + 2, step, typical) if step > _CLEAR * typical > 0 else None


def _holds_positions(name: str, module: nn.Embedding, limit: object) -> bool:
    last = name.rpartition(".")[2].lower()
    return "position" in last or last == "wpe" or ("pos" in last and module.num_embeddings == limit)
