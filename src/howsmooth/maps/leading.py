"""Where the values of attention lead: the output direction that a guess of the top input is made of."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.maps.operator import stream

_STEPS, _STEPS_ALONE = 40, 10  # products with `Wₒ W_v` and with a head's part of it: little beside one with the Jacobian
_ALONE = 0.3  # share of single heads beside all of them: attention may favour one whose values are not the largest


def led_to(
    outward: Float[Tensor, "heads d_out d_v"], inward: Float[Tensor, "heads d_v d"], seeds: Sequence[int]
) -> Float[Tensor, "batch d_out"]:
    """Unit output directions that values reach most, one for each seed.

    `K = Σ_h Wₒ^h W_v^h` is what attention does where all heads share one `P` of rank one: its top output. To it is added what
    each head does alone, with random signs.
    """
    own = {seed: i for i, seed in enumerate(dict.fromkeys(seeds))}  # items of one seed share a direction
    return _led_to(outward, inward, list(own))[[own[seed] for seed in seeds]]


def _led_to(outward: Tensor, inward: Tensor, seeds: Sequence[int]) -> Tensor:
    heads, _, _ = outward.shape
    draws = [stream(seed, "guess") for seed in seeds]
    starts = torch.stack([torch.randn(1 + heads, inward.shape[-1], generator=draw) for draw in draws]).to(inward)
    signs = torch.stack([torch.randint(2, (heads, 1), generator=draw) for draw in draws]).to(inward) * 2 - 1
    whole = _top_output(outward.transpose(0, 1).flatten(1), inward.flatten(0, 1), starts[:, 0], _STEPS)
    if heads == 1:
        return _unit(whole)
    alone = _top_output(outward, inward, starts[:, 1:], _STEPS_ALONE)  # (batch, heads, d_out)
    return _unit(_unit(whole) + _ALONE * _unit((signs * alone).sum(1)))


def _top_output(a: Float[Tensor, "*k out m"], b: Float[Tensor, "*k m d"], u: Float[Tensor, "*axes d"], steps: int) -> Tensor:
    """`a b` of inputs that it stretches nearly most, from each start: Lanczos on `(a b)ᵀ a b`."""

    def image(v: Tensor) -> Tensor:
        return (v @ b.mT) @ a.mT

    basis = u.new_zeros(*u.shape[:-1], 0, u.shape[-1])
    u = u[..., None, :]  # (…, 1, d)
    for _ in range(min(steps, u.shape[-1])):
        for _ in range(2):
            u = u - (u @ basis.mT) @ basis
        u = _unit(u)
        basis = torch.cat([basis, u], -2)
        u = (image(u) @ a) @ b
    images = image(basis)
    _, vectors = torch.linalg.eigh(images @ images.mT)
    return (vectors[..., -1:].mT @ images)[..., 0, :]


def _unit(v: Tensor) -> Tensor:
    length = v.norm(dim=-1, keepdim=True)
    return v / torch.where(length > 0, length, 1.0)
