"""Where the values of attention lead: the output direction that a guess of the top input is made of."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.spectral.operator import stream, unit_rows

_STEPS = 40  # products with `Wₒ W_v` that a guess may take: little beside one product with the Jacobian


def led_to(
    outward: Float[Tensor, "heads d_out d_v"], inward: Float[Tensor, "heads d_v d"], seeds: Sequence[int]
) -> Float[Tensor, "batch d_out"]:
    """Unit output directions that values reach most, one for each seed: the top output of `Σ_h Wₒ^h W_v^h`, by Lanczos."""
    a, b = (_moderate(w) for w in (outward.transpose(0, 1).flatten(1), inward.flatten(0, 1)))
    own = {seed: i for i, seed in enumerate(dict.fromkeys(seeds))}  # items of one seed share a start
    u = torch.stack([torch.randn(b.shape[1], generator=stream(seed, "guess")) for seed in own]).to(b)[:, None]
    basis = u[:, :0]
    for _ in range(min(_STEPS, b.shape[1])):
        for _ in range(2):
            u = u - (u @ basis.mT) @ basis
        u = unit_rows(u)
        basis = torch.cat([basis, u], 1)
        u = ((u @ b.mT) @ a.mT) @ a @ b
    images = (basis @ b.mT) @ a.mT
    _, vectors = torch.linalg.eigh(images @ images.mT)
    return unit_rows((vectors[:, :, -1:].mT @ images)[:, 0])[[own[seed] for seed in seeds]]


def _moderate(w: Tensor) -> Tensor:
    """The same directions from numbers whose products stay in range."""
    size = float(w.abs().max())
    return w / size if size and not 1e-6 < size < 1e6 else w
