"""The experiments as tasks: functions of plain arguments that return rows, so that a sweep can stop and go on."""

import math
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.models import FallbackWarning
from howsmooth.paper import meanfield
from howsmooth.paper import splitting_maps as splitting
from howsmooth.paper.configurations import grow
from howsmooth.paper.scripts import power_iteration, scripts_value
from howsmooth.paper.subjects import Masking, attention_of, subject
from howsmooth.search.families import worst_configuration
from howsmooth.spectral import Estimate
from howsmooth.verbs import lipschitz

ONE_HEAD = "one head, A = −I"
WHOLE_MODULE = "attention + residual + LayerNorm"
_TOKENS_FOR_RADIUS = 98


def text(name: str, masking: Masking, layers: list[int], n: int, sample: int, seed: int) -> list[dict[str, Any]]:
    """One window of text through a model: for every layer `L`, what the scripts print, and `R`."""
    captured = subject(name, masking, seed).capture(n, sample, seed)
    rows = []
    for layer in layers:
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            cut = captured.map(layer)
        x = cut.start.to(cut.dtype)
        estimate = lipschitz(cut, x, seed=seed)
        rows.append(
            _row("random" if name.startswith("random:") else "real", name, masking, layer, "attention", n, sample)
            | _constant(estimate)
            | {"scripts": scripts_value(cut, x), "radius": _radius(x), "seconds": time.perf_counter() - started}
        )
    return rows


def whole_module(name: str, layers: list[int], n: int, sample: int, seed: int) -> list[dict[str, Any]]:
    """The module that the scripts read for BERT: attention, projection, residual and LayerNorm, without a mask."""
    captured = subject(name, "unmasked", seed).capture(n, sample, seed)
    rows = []
    for layer in layers:
        found = captured.trace.layers[layer]
        x = found.x.float()
        f = _Whole(dict(found.block.module.named_modules())["attention"])
        estimate = lipschitz(f, x, seed=seed)
        printed = power_iteration(f, x, element=0, steps=2, seed=seed)
        rows.append(
            _row("trap", name, "unmasked", layer, WHOLE_MODULE, n, sample)
            | _constant(estimate)
            | {"scripts": printed[-1], "radius": _radius(x)}
        )
    return rows


class _Whole(nn.Module):
    """`BertAttention` as a function of its tokens, (n, d)."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x[None])[0][0]


def iteration(name: str, masking: Masking, layer: int, n: int, start: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """The iteration step by step from one random start, with either element of what `torch.func.jvp` returns."""
    found = subject(name, masking, seed)
    captured = found.capture(n, 0, seed)
    attn = attention_of(found, layer).to(torch.float64)
    x = captured.tokens(layer).double()
    truth, limit = lipschitz(attn, x, tol=1e-8).value, scripts_value(attn, x)
    printed = {k: power_iteration(attn, x, element=k, steps=steps, seed=start) for k in (0, 1)}
    return [
        _row("iteration", name, masking, layer, "attention", n, 0)
        | {"start": start, "step": k + 1, "element_0": a, "element_1": b, "value": truth, "scripts": limit}
        for k, (a, b) in enumerate(zip(printed[0], printed[1], strict=True))
    ]


def adversarial(name: str, masking: Masking, layer: int, lengths: list[int], seed: int) -> list[dict[str, Any]]:
    """The paper's eigenvector tokens at every length, the whole layer measured; R is that of the text at this layer."""
    attn, radius = _layer(name, masking, layer, seed)
    found = grow(attn, radius, lengths, seed=seed)
    about = str(found.configuration)
    return [
        _row("adversarial", name, masking, layer, "eigenvector tokens", row.n, 0)
        | _constant(row.estimate)
        | {"scripts": scripts_value(attn, row.tokens), "radius": radius, "configuration": about, "bound_B7": _exp(log)}
        for row, log in zip(found.rows, found.log_bounds, strict=True)
    ]


def worst_tokens(name: str, masking: Masking, layer: int, n: int, seed: int) -> list[dict[str, Any]]:
    """The worst of all the package's configurations in the same ball."""
    attn, radius = _layer(name, masking, layer, seed)
    found = worst_configuration(attn, n, radius, seed=seed)
    scripts, about = scripts_value(attn, found.tokens), str(found.configuration)
    row = _row("adversarial", name, masking, layer, "worst configuration", n, 0) | _constant(found.estimate)
    return [row | {"scripts": scripts, "radius": radius, "configuration": about}]


def worst_measure(alpha: float, radius: float) -> list[dict[str, Any]]:
    """The worst two Diracs in a ball beside the mean-field bounds."""
    return [{"study": "meanfield", "kind": "growth"} | row.to_dict() for row in meanfield.growth(alpha, [radius])]


def many_tokens(alpha: float, radius: float, lengths: list[int], seeds: int) -> list[dict[str, Any]]:
    """Constants of n tokens beside the mean-field constant: of a Gaussian cut to the ball."""
    one = torch.ones(1, 1, dtype=torch.float64)
    attn = Attention.from_matrices(alpha * one, one)
    fine = max(1024, 4 * max(lengths))
    rows = meanfield.convergence(attn, lambda x: torch.exp(-x[:, 0].square() / 2), radius, lengths, seeds, fine)
    return [{"study": "meanfield", "alpha": alpha, "radius": radius} | row.to_dict() for row in rows]


def worst_clusters(alpha: float, radius: float, lengths: list[int]) -> list[dict[str, Any]]:
    """The worst two clusters of n equal tokens beside the worst measure."""
    rows = meanfield.worst_clusters(alpha, radius, lengths)
    return [{"study": "meanfield", "alpha": alpha, "radius": radius} | row.to_dict() for row in rows]


def splitting_map(alpha: float, mass: float, extent: float, points: int) -> dict[str, Any]:
    """Two atoms on a line, on a grid of places: how often splitting pays, and where most."""
    grid = splitting.splitting_map([alpha], [mass], extent, points)
    best = max(grid, key=lambda p: p.gain)
    row = {"study": "splitting", "kind": "map", "alpha": alpha, "mass": mass, "extent": extent, "points": points}
    pays = sum(p.gain > 1 for p in grid) / len(grid)
    return row | {"pays": pays, "largest_gain": best.gain, "x": best.x, "y": best.y}


def splitting_frequency(n: int, logits: float, count: int, causal: bool, seed: int) -> dict[str, Any]:
    """How often splitting pays among random layers and Gaussian inputs."""
    cases = splitting.frequency(splitting.random_layers(count, [n], [logits], causal=causal, seed=seed))
    found = splitting.shares(cases)[0]
    return {"study": "splitting", "kind": "frequency", "n": n, "logits": logits, "causal": causal} | found.to_dict()


def _layer(name: str, masking: Masking, layer: int, seed: int) -> tuple[Attention, float]:
    """A layer's weights and the radius of the text there; or one head, where the theory is exact."""
    if name == ONE_HEAD:
        eye = torch.eye(2, dtype=torch.float64)
        return Attention.from_matrices(-eye, eye, causal=masking == "masked"), 3.0
    found = subject(name, masking, seed)
    captured = found.capture(min(_TOKENS_FOR_RADIUS, found.longest), 0, seed)
    if not 0 <= layer < captured.num_layers:
        raise BadInputError(f"expected a layer from 0 to {captured.num_layers - 1}, got {layer}; {name} has no other")
    return attention_of(found, layer), _radius(captured.tokens(layer))


def _row(study: str, name: str, masking: str, layer: int, tokens: str, n: int, sample: int) -> dict[str, Any]:
    return {"study": study, "subject": name, "masking": masking, "layer": layer, "map": tokens, "n": n, "sample": sample}


def _constant(estimate: Estimate) -> dict[str, Any]:
    found = estimate.to_dict()
    return {k: found[k] for k in ("value", "lower", "upper", "confidence", "status", "steps", "seed")}


def _radius(x: Tensor) -> float:
    """R, the root mean square norm of the tokens."""
    return float(x.double().square().sum(-1).mean().sqrt())


def _exp(log: float) -> float | None:
    return math.exp(log) if log < 700 else None
