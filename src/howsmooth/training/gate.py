"""Layers of one graph, asked at once: a gate in front of each keeps what is asked of one from reaching those before it."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor


@final
class Gates:
    """All gates of one pass. Once they are open, gradients go through as if there were none."""

    def __init__(self):
        self.shut = True

    def behind(self, x: Tensor) -> Tensor:
        """`x`, which needs a gradient, behind a gate."""
        return _Gate.apply(x, self)  # pyright: ignore[reportReturnType]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Gates) -> Tensor:
        ctx.gates = gates
        ctx.set_materialize_grads(False)
        return x.clone()  # which nobody else writes into

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        return None if ctx.gates.shut else grads[0], None


def apart(ends: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether no `y` reaches the gate of another layer but through its own.

    ends: (x, y) of every layer, each `x` behind a gate.

    >>> gates = Gates()
    >>> a = gates.behind(torch.ones(2, requires_grad=True))
    >>> b = gates.behind(3 * a)
    >>> apart([(a, 2 * a), (b, b.exp())]), apart([(a, 2 * a), (b, a + b)])
    (True, False)
    """
    gates = {x.grad_fn for x, _ in ends}
    for x, y in ends:
        ways, known = [y.grad_fn], {x.grad_fn}
        while ways:
            node = ways.pop()
            if node is None or node in known:
                continue
            if node in gates:
                return False
            known.add(node)
            ways += [before for before, _ in node.next_functions]
    return True
