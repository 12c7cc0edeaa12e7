"""Eight singular values beside scipy's `svds` (ARPACK) on the same products, which has no certificate."""

from typing import Any

import torch
from scipy.sparse.linalg import svds
from tests.problems.layers import random_layer

import howsmooth as hs
from benchmarks.harness import agree
from benchmarks.spectra import CERTIFY, Counted, K

TITLE = "Products with J and with Jᵀ for eight singular values of layers with 20 tokens of width 64, in float64"


def run(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for seed in range(2 if quick else 8):
        layer, x = random_layer(seed, n=20, width=64)
        layer, x = layer.to(torch.float64), x.double()
        products: dict[str, int] = {}
        found: dict[str, list[float]] = {}
        for name, certify in (("certify=0.02", CERTIFY), ("default", None)):
            with Counted() as counted:
                spectrum = hs.lipschitz(layer, x, k=K, certify=certify)
            found[name], products[name] = spectrum.values.tolist(), counted.count
        for name, tol in (("svds tol=1e-3", 1e-3), ("svds", 0.0)):
            with Counted() as counted:
                values = svds(hs.jacobian(layer, x).to_scipy(), k=K, tol=tol, return_singular_vectors=False, rng=0)  # pyright: ignore[reportArgumentType]
            found[name], products[name] = sorted(map(float, values), reverse=True), counted.count
        for name, accuracy in (("certify=0.02", CERTIFY), ("default", 1e-3), ("svds tol=1e-3", 1e-2)):
            for value, truth in zip(found[name], found["svds"], strict=True):
                agree(name, value, truth, accuracy)
        rows.append({"layer": seed} | products)
    return rows
