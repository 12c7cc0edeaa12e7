"""What a certificate costs: pairs until `upper/lower ≤ 1 + certify`, at n = 1024 and width 768 (N = 786 432)."""

from typing import Any

import howsmooth as hs
from benchmarks.harness import agree
from benchmarks.layers import gpt2_layer

TITLE = "Pairs to a certificate at N = 786 432, failure probability 1e-6"


def run(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for causal in (True,) if quick else (True, False):
        layer, x = gpt2_layer(1024, causal)
        truth = hs.lipschitz(layer, x, tol=1e-5, seed=5).value
        for width in (None, 0.02, 0.005):
            est = hs.lipschitz(layer, x, certify=width)
            agree("howsmooth", est.value, truth, 1e-3)
            rows.append(
                {
                    "mask": "causal" if causal else "full",
                    "certify": width or "default",
                    "pairs": est.steps,
                    "upper/lower": est.upper / est.lower,
                    "status": est.status,
                }
            )
    return rows
