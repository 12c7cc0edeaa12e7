"""With and without the norm in front: attention alone at the tokens that enter it, the norm alone, and both together.

The norm in front of a layer is the module whose output enters it: the block's own where a block normalises before it attends,
that of the block before, or of the embeddings, where it normalises afterwards.
"""

import time
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.maps import LayerNorm, RMSNorm
from howsmooth.maps.base import Map
from howsmooth.models import Capture
from howsmooth.models.trace import evaluating
from howsmooth.study.jobs import Job, Row
from howsmooth.study.layers import Setting, row_of
from howsmooth.study.reader import Reader, entering
from howsmooth.verbs import lipschitz

_SAME = 1e-4  # relative; another formula differs by far more


def norm_jobs(setting: Setting) -> list[Job]:
    """Every layer, length and sample."""
    q = setting.question
    return [
        Job(measure_norms, {"n": n, "start": s, "sample": k, "layers": list(setting.layers)} | q.options())
        for n in sorted(set(q.lengths), reverse=True)
        for k, s in enumerate(setting.starts)
    ]


def measure_norms(
    reader: Reader, n: int, start: int, sample: int, layers: list[int], tol: float, certify: float | None, seed: int
) -> list[Row]:
    """Rows with map `attention`, `norm` and `normed` (the norm, then attention); the last two where a norm is in front."""
    captured = reader.captures(n, [start])[0]
    options: dict[str, Any] = {"tol": tol, "certify": certify, "seed": seed}
    calls, rows = norm_calls(captured), []
    for layer in layers:
        attn: Map = reader.closed(captured, layer) or reader.map(captured, layer)
        x = entering(captured, layer)
        found: list[tuple[str, Map, Tensor]] = [("attention", attn, x)]
        norm = norm_in_front(calls, x)
        if norm is not None:
            found += [("norm", norm[0], norm[1]), ("normed", attn @ norm[0], norm[1])]
        for map, f, tokens in found:
            began = time.perf_counter()
            estimate = lipschitz(f, tokens, **options)
            lengths = tokens.double().norm(dim=-1)
            rows.append(
                row_of(reader, "norms", layer, map, n, sample, estimate)
                | {
                    "start": start,
                    "radius": float(lengths.square().mean().sqrt()),
                    "radius_max": float(lengths.max()),
                    "seconds": time.perf_counter() - began,
                }
            )
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
        stack.enter_context(evaluating(captured.owner))
        for module in captured.owner.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.ndim == 1:
                stack.enter_context(module.register_forward_hook(note))
        captured.owner(*captured.args, **captured.kwargs)
    return calls


def norm_in_front(calls: list[Call], x: Tensor) -> tuple[LayerNorm | RMSNorm, Tensor] | None:
    """The norm whose output is `x`, and what it took; nothing where there is none of a form we know."""
    for module, before, after in calls:
        if after.shape != x.shape or not torch.allclose(after, x, rtol=1e-3, atol=1e-4 * float(x.abs().max())):
            continue
        for norm in _candidates(module):
            if float((norm(before) - after).abs().max()) <= _SAME * float(after.abs().max()):
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
