"""torch's flex_attention by torch's own dense formula: as one operation it knows no derivative on every device."""

import torch
from torch._higher_order_ops.flex_attention import math_attention
from torch.fx import GraphModule

from howsmooth.program.nodes import name

FLEX = math_attention.__name__
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def replace_flex(code: GraphModule) -> None:
    """Give every call of flex_attention the dense formula as its target.

    It gives the outputs `softmax(score_mod(scale Q Kᵀ, b, h, i, j)) V`, and, to base 2, the logarithms of the sums and the
    largest logits.
    """
    found = [n for n in code.graph.nodes if n.op == "call_function" and name(n) == "flex_attention"]
    for n in found:
        n.target = math_attention
    for n in code.graph.nodes if found else ():
        if n.target in _VIEWS:  # its outputs have another layout in memory
            n.target = torch.ops.aten.reshape.default
    code.recompile()
