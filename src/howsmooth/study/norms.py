"""With and without the norm in front: attention alone at the tokens that enter it, the norm alone, and both together.

The norm in front of a layer is the module whose output enters it: the block's own where a block normalises before it attends,
that of the block before, or of the embeddings, where it normalises afterwards.
"""

import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.maps import LayerNorm, Map, RMSNorm
from howsmooth.models import Capture
from howsmooth.models.intercept import implementation
from howsmooth.models.measurement import estimate_columns
from howsmooth.models.sample import same
from howsmooth.models.trace import evaluating
from howsmooth.study.jobs import Job, Row
from howsmooth.study.layers import Part, Setting, parts
from howsmooth.study.reader import Reader
from howsmooth.verbs import lipschitz


def norm_jobs(setting: Setting) -> list[Job]:
    """Every layer, length and sample."""
    return [Job(measure_norms, {"part": asdict(one)}) for part in parts(setting) for one in part.windows()]


def measure_norms(reader: Reader, part: dict[str, Any]) -> list[Row]:
    """Rows with map `attention`, `norm` and `normed` (the norm, then attention); the last two where a norm is in front."""
    one = replace(Part.of(part), map="attention")
    captured = one.capture(reader)
    calls, rows = norm_calls(captured), []
    for m, window in one.measure(reader):
        rows.append(m.row("norms", **window))
        attn: Map = captured.closed(m.layer) or captured.map(m.layer)
        front = norm_in_front(calls, captured.tokens(m.layer))
        if front is None:
            continue
        norm, tokens = front
        lengths = tokens.double().norm(dim=-1)
        radii = {"radius": float(lengths.square().mean().sqrt()), "radius_max": float(lengths.max())}
        for name, f in (("norm", norm), ("normed", attn @ norm)):
            began = time.perf_counter()
            estimate = lipschitz(f, tokens, tol=one.tol, certify=one.certify)
            seconds = time.perf_counter() - began
            rows.append(rows[-1] | estimate_columns(estimate) | radii | {"map": name, "seconds": seconds})
    return rows


Call = tuple[nn.Module, Tensor, Tensor]


@torch.no_grad()
def norm_calls(captured: Capture) -> list[Call]:
    """Every module with a vector of weights that ran, what entered it and what left it, (n, d)."""
    calls: list[Call] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and args[0].shape == output.shape:
            calls.append((module, args[0].detach().flatten(0, -2).clone(), output.detach().flatten(0, -2).clone()))

    with ExitStack() as stack:
        stack.enter_context(evaluating(captured.sample.owner))
        stack.enter_context(implementation(captured.sample.owner, "eager"))  # some others leave a soft-cap out
        for module in captured.sample.owner.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.ndim == 1:
                stack.enter_context(module.register_forward_hook(note))
        captured.sample.owner(*captured.sample.args, **captured.sample.kwargs)
    return calls


def norm_in_front(calls: list[Call], x: Tensor) -> tuple[LayerNorm | RMSNorm, Tensor] | None:
    """The norm whose output is `x`, and what it took; nothing where there is none of a form we know."""
    for module, before, after in calls:
        if after.shape != x.shape or not torch.allclose(after, x, rtol=1e-3, atol=1e-4 * float(x.abs().max())):
            continue
        for norm in _candidates(module):
            if same(norm(before), after):
                return norm, before
    return None


def _candidates(module: nn.Module) -> list[LayerNorm | RMSNorm]:
    """What a module of one vector, perhaps with a bias, may compute: LayerNorm, RMSNorm, RMSNorm with `1 + w` as in Gemma."""
    weight, bias = module.weight, getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or (bias is not None and not isinstance(bias, Tensor)):
        return []
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    named = [getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon")]
    eps = next((float(e) for e in named if isinstance(e, float)), 1e-6)
    return [LayerNorm(weight, bias, eps), RMSNorm(weight, bias, eps), RMSNorm(1 + weight, bias, eps)]
