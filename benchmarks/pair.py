"""One jvp + vjp pair against its matrix products alone, run as bare matmuls of the same shapes into ready memory."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import agree, side_by_side
from benchmarks.layers import HEADS, WIDTH, gpt2_layer, plain

TITLE = "One jvp + vjp pair against its bare matrix products (causal: against half of the n × n products)"


@torch.no_grad()
def run(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for n in (256, 1024):
        bare_kernel, bare_layer = _bare(n)
        for causal in (False, True):
            layer, x = gpt2_layer(n, causal)
            operator = layer.linearize(x[None])[1]
            v = torch.randn(1, 1, n, WIDTH, generator=torch.Generator().manual_seed(1))
            image = torch.func.jvp(plain(layer, n), (x,), (v[0, 0],))[1]
            agree("jvp", float((operator.jvp(v)[0, 0] - image).norm() / image.norm()) + 1, 1.0, 1e-5)
            q, k, u = layer.project(v, with_bias=False)
            kernel = operator.kernel  # pyright: ignore[reportAttributeAccessIssue]
            out = kernel.jvp(q, k, u)
            ours, bare, whole, bare_whole = side_by_side(
                [
                    lambda kernel=kernel, q=q, k=k, u=u, out=out: (kernel.jvp(q, k, u), kernel.vjp(out)),
                    bare_kernel,
                    lambda operator=operator, v=v: operator.gram(v),
                    bare_layer,
                ],
                repeat=3 if quick else 9,
            )
            part = 0.5 if causal else 1.0
            rows.append(
                {
                    "n": n,
                    "mask": "causal" if causal else "full",
                    "attention s": ours,
                    "bare s": bare * part,
                    "attention/bare": ours / (bare * part),
                    "layer s": whole,
                    "layer bare s": bare * part + bare_whole,
                    "layer/bare": whole / (bare * part + bare_whole),
                }
            )
    return rows


def _bare(n: int):
    """The eight n × n × head products, and the eight n × width × width projections."""
    d = WIDTH // HEADS
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randn(HEADS, n, d, generator=random) for _ in range(2))
    p = torch.rand(HEADS, n, n, generator=random)
    square, thin = torch.empty(HEADS, n, n), torch.empty(HEADS, n, d)
    x, w = torch.randn(n, WIDTH, generator=random), torch.randn(WIDTH, WIDTH, generator=random)
    flat: Tensor = torch.empty(n, WIDTH)

    def kernel() -> None:
        for _ in range(3):  # dq kᵀ, q dkᵀ, g vᵀ
            torch.bmm(a, b.mT, out=square)
        for _ in range(3):  # T v, P dv, dS k
            torch.bmm(p, a, out=thin)
        for _ in range(2):  # Pᵀ g, dSᵀ q
            torch.bmm(p.mT, a, out=thin)

    def projections() -> None:
        for _ in range(4):
            torch.mm(x, w.T, out=flat)
        for _ in range(4):
            torch.mm(x, w, out=flat)

    return kernel, projections
