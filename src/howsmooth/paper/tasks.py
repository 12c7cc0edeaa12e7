"""The experiments as tasks: functions of plain arguments that return rows, so that a sweep can stop and go on.

Beside the constant they give the number that the paper's public scripts print. With `y, t = torch.func.jvp(f, (x,), (u,))`,
`y = f(x)` and `t = J u`. The scripts go on with element 0, `y`; power iteration needs element 1. docs/howto/reproduction.md §6
says in two lines what either gives.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.maps import Attention, Map
from howsmooth.models import FallbackWarning
from howsmooth.paper import meanfield
from howsmooth.paper.ball import grow
from howsmooth.paper.subjects import LONGEST, Masking, attention_of, subject
from howsmooth.search import worst_configuration
from howsmooth.spectral import Estimate
from howsmooth.verbs import lipschitz

ONE_HEAD = "one head, A = −I"
WHOLE_MODULE = "attention + residual + LayerNorm"


def power_iteration(
    f: Callable[[Tensor], Tensor], x: Float[Tensor, "n d"], *, element: Literal[0, 1], steps: int = 10, seed: int = 0
) -> list[float]:
    """What is printed after each step: `√|Jᵀ w|` with `w` an element of what `torch.func.jvp` returns, then `u ← Jᵀw/|Jᵀw|`.

    element: 0 as in the scripts, where the answer is `√|Jᵀ f(x)|` from the first step on; 1 for power iteration on `JᵀJ`, which
    tends to `‖J‖₂`.

    >>> f = lambda x: 2 * x + 1
    >>> x = torch.tensor([[3.0, 4.0]])
    >>> [round(v, 6) for v in power_iteration(f, x, element=1, steps=2)]  # ‖J‖ = 2
    [2.0, 2.0]
    >>> [round(v * v, 5) for v in power_iteration(f, x, element=0, steps=2)]  # |Jᵀ f(x)| = 2 |(7, 9)|
    [22.80351, 22.80351]
    """
    x = x.detach()
    u = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    u = u / u.norm()
    printed = []
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():  # the one that has forward mode
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, on first use of forward mode
        for _ in range(steps):
            w = torch.func.jvp(f, (x,), (u,))[element]
            (back,) = torch.func.vjp(f, x)[1](w)
            size = back.norm()
            printed.append(float(size.detach().sqrt()))
            u = (back / size).detach()
    return printed


@torch.no_grad()
def scripts_value(f: Map, x: Float[Tensor, "n d"]) -> float:
    """`√|Jᵀ f(x)|`, the fixed point of that iteration with element 0, from one product."""
    x = f.prepare(x)
    output, jacobian = f.linearize(x[None])
    return float(jacobian.vjp(output[None])[0, 0].double().norm().sqrt())


def text(
    name: str,
    masking: Masking,
    layers: list[int],
    n: int,
    sample: int,
    seed: int,
    device: str = "auto",
    passage: str | None = None,
    digest: str = "",
) -> list[dict[str, Any]]:
    """One window of text through a model: for every layer `L`, what the scripts print, and `R`. digest: of the passage."""
    captured = subject(name, masking, seed, device, passage).capture(n, sample, seed)
    study = "random" if name.startswith("random:") else "real"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        measured = [(m, captured.map(m.layer)) for m in captured.measure(layers, closed=False, seed=seed)]
    return [
        _row(study, name, masking, m.layer, "attention", n, sample)
        | _constant(m.estimate)
        | {"scripts": scripts_value(cut, cut.start), "radius": m.radius_rms}
        for m, cut in measured
    ]


def whole_module(
    name: str, layers: list[int], n: int, sample: int, seed: int, passage: str | None = None, digest: str = ""
) -> list[dict[str, Any]]:
    """The module that the scripts read for BERT: attention, projection, residual and LayerNorm, without a mask."""
    whole = subject(name, "unmasked", seed, passage=passage)
    captured, rows = whole.capture(n, sample, seed), []
    for layer in layers:
        x, f = captured.tokens(layer).float(), _Whole(whole.whole_modules[layer])
        row = _row("trap", name, "unmasked", layer, WHOLE_MODULE, n, sample) | _constant(lipschitz(f, x, seed=seed))
        printed = power_iteration(f, x, element=0, steps=2, seed=seed)
        rows.append(row | {"scripts": printed[-1], "radius": _radius(x)})
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
    whole = subject(name, masking, seed)
    attn = attention_of(whole, layer).to(torch.float64)
    x = whole.capture(n, 0, seed).tokens(layer).double()
    truth, limit = lipschitz(attn, x, tol=1e-8).value, scripts_value(attn, x)
    output, tangent = (power_iteration(attn, x, element=k, steps=steps, seed=start) for k in (0, 1))
    return [
        _row("iteration", name, masking, layer, "attention", n, 0)
        | {"start": start, "step": k, "element_0": a, "element_1": b, "value": truth, "scripts": limit}
        for k, (a, b) in enumerate(zip(output, tangent, strict=True), start=1)
    ]


def adversarial(
    name: str, masking: Masking, layer: int, lengths: list[int], seed: int, passage: str | None = None, digest: str = ""
) -> list[dict[str, Any]]:
    """The paper's eigenvector tokens at every length, the whole layer measured; R is that of the text at this layer."""
    attn, radius = _layer(name, masking, layer, seed, passage)
    growth = grow(attn, radius, lengths, seed=seed)
    return [
        _row("adversarial", name, masking, layer, "eigenvector tokens", row.n, 0)
        | _constant(row.estimate)
        | {"scripts": scripts_value(attn, row.tokens), "radius": radius, "configuration": str(row.configuration)}
        | {"bound_B7": math.exp(log) if log < 700 else None}  # the largest logarithm of a float64, rounded down
        for row, log in zip(growth.rows, growth.log_bounds, strict=True)
    ]


def worst_tokens(
    name: str, masking: Masking, layer: int, n: int, seed: int, passage: str | None = None, digest: str = ""
) -> list[dict[str, Any]]:
    """The worst of all the package's configurations in the same ball."""
    attn, radius = _layer(name, masking, layer, seed, passage)
    worst = worst_configuration(attn, n, radius, seed=seed)
    scripts, about = scripts_value(attn, worst.tokens), str(worst.configuration)
    row = _row("adversarial", name, masking, layer, "worst configuration", n, 0) | _constant(worst.estimate)
    return [row | {"scripts": scripts, "radius": radius, "configuration": about}]


def worst_measure(alpha: float, radius: float) -> list[dict[str, Any]]:
    """The worst two Diracs in a ball beside the mean-field bounds."""
    return [{"study": "meanfield", "kind": "growth"} | row for row in meanfield.worst_measures(alpha, [radius])]


def many_tokens(alpha: float, radius: float, lengths: list[int], seeds: int) -> list[dict[str, Any]]:
    """Constants of n tokens beside the mean-field constant: of a Gaussian cut to the ball."""
    rows = meanfield.gaussian_convergence(alpha, radius, lengths, seeds)
    return [{"study": "meanfield", "alpha": alpha, "radius": radius} | row for row in rows]


def worst_clusters(alpha: float, radius: float, lengths: list[int]) -> list[dict[str, Any]]:
    """The worst two clusters of n equal tokens beside the worst measure."""
    rows = meanfield.worst_clusters(alpha, radius, lengths)
    return [{"study": "meanfield", "alpha": alpha, "radius": radius} | row for row in rows]


def splitting_map(alpha: float, mass: float, extent: float, points: int) -> dict[str, Any]:
    """Two atoms on a line, on a grid of places: how often splitting pays, and where most."""
    best = meanfield.map_table(meanfield.splitting_map([alpha], [mass], extent, points))[0]
    row = {"study": "splitting", "kind": "map", "alpha": alpha, "mass": mass, "extent": extent, "points": points}
    share = best["pays"] / best["points"]
    return row | {"pays": share, "largest_gain": best["largest gain"], "x": best["x"], "y": best["y"]}


def splitting_frequency(n: int, logits: float, count: int, causal: bool, seed: int) -> dict[str, Any]:
    """How often splitting pays among random layers and Gaussian inputs."""
    cases = meanfield.frequency(meanfield.random_layers(count, [n], [logits], causal=causal, seed=seed))
    share = meanfield.shares(cases)[0]
    return {"study": "splitting", "kind": "frequency", "n": n, "logits": logits, "causal": causal} | share


def _layer(name: str, masking: Masking, layer: int, seed: int, passage: str | None) -> tuple[Attention, float]:
    """A layer's weights and the radius of the text there; or one head, where the theory is exact."""
    if name == ONE_HEAD:
        eye = torch.eye(2, dtype=torch.float64)
        return Attention.from_matrices(-eye, eye, causal=masking == "masked"), 3.0
    whole = subject(name, masking, seed, passage=passage)
    radius = _radius(whole.capture(min(LONGEST, whole.longest), 0, seed).tokens(layer))
    return attention_of(whole, layer), radius


def _row(study: str, name: str, masking: str, layer: int, tokens: str, n: int, sample: int) -> dict[str, Any]:
    return {"study": study, "subject": name, "masking": masking, "layer": layer, "map": tokens, "n": n, "sample": sample}


def _constant(estimate: Estimate) -> dict[str, Any]:
    return {k: getattr(estimate, k) for k in ("value", "lower", "upper", "confidence", "status", "steps", "seed")}


def _radius(x: Tensor) -> float:
    """R, the root mean square norm of the tokens."""
    return float(x.double().square().sum(-1).mean().sqrt())
