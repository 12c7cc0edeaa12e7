"""What is cut and what falls back, architecture by architecture: tiny random float64 models against their own eager code."""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

TITLE = "Tiny random models of every architecture against the dense Jacobian of their own eager code in float64"


def run(quick: bool) -> list[dict[str, Any]]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the models are those of the tests
    from problems.zoo import ZOO

    names = [name for i, name in enumerate(ZOO) if not quick or i % 7 == 0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [_row(name) for name in names]


def _row(name: str) -> dict[str, Any]:
    import howsmooth as hs
    from benchmarks.harness import agree
    from howsmooth.models import MAPS
    from problems.zoo import ZOO, randomize, reference

    animal = ZOO[name]
    model = hs.load(randomize(animal.build(), scale=animal.scale).double(), side=animal.side)
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in animal.inputs().items()}
    captured = model.capture(inputs=inputs)
    module: Any = model.module
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    errors = {}
    found = {}
    for kind, start, end in (("attention", animal.attention, animal.projection), ("block", animal.block, animal.block)):
        start, end = (path.replace("{}", str(animal.layer)) for path in (start, end))
        jacobian = reference(module, inputs, start, end)[1]
        truth = float(torch.linalg.matrix_norm(jacobian, 2))
        found[kind] = captured.measure(animal.layer, MAPS[MAPS.index(kind)])
        agree(f"{name} {kind}", found[kind].value, truth, 1e-6)
        errors[kind] = abs(found[kind].value / truth - 1)
    module.set_attn_implementation(before)
    segment = captured.map(animal.layer)
    with torch.no_grad():
        calls = segment.replayed(segment.start).calls
    return {
        "architecture": name,
        "attention": type(module.get_submodule(segment.place)).__name__,
        "mask": _mask(calls[0].scores) if calls else "its own",
        "way": "kernels" if found["attention"].cut else "falls back",
        "as `Attention`": "no" if captured.closed(animal.layer) is None else "yes",
        "error, attention": f"{errors['attention']:.0e}",
        "error, block": f"{errors['block']:.0e}",
    }


def _mask(scores: Any) -> str:
    """The mask that reached the kernels, in words."""
    mask = scores.mask
    parts = ["causal"] if mask.causal else []
    parts += [f"window {mask.window}"] if mask.window else []
    parts += ["bias"] if mask.bias is not None else []
    parts += [f"soft-cap {scores.softcap:g}"] if scores.softcap else []
    parts += ["sink"] if getattr(scores.kind, "sink", None) is not None else []
    return ", ".join(parts) or "none"
