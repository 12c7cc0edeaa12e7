"""Where the values of attention lead: the output direction that a guess of the top input is made of."""

import hashlib
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.maps.operator import stream

_STEPS, _STEPS_ALONE = 40, 10  # products with `Wₒ W_v` and with a head's part of it: little beside one with the Jacobian
_SAMPLED = 64  # entries of a matrix that its mark is made of
_ALONE = 0.3  # share of single heads beside all of them: attention may favour one whose values are not the largest


def led_to(
    outward: Float[Tensor, "heads d_out d_v"], inward: Float[Tensor, "heads d_v d"], seeds: Sequence[int]
) -> Float[Tensor, "batch d_out"]:
    """Unit output directions that values reach most, one for each seed, the work shared by all of them.

    `K = Σ_h Wₒ^h W_v^h` is what attention does where all heads share one `P` of rank one: its top output. To it is added what
    each head does alone, with random signs.
    """
    heads, d = len(outward), inward.shape[-1]
    draw = stream(_mark(outward, inward), "values")
    starts = torch.randn(1 + heads, d, generator=draw).to(inward)
    whole = _unit(_top_output(outward.transpose(0, 1).flatten(1), inward.flatten(0, 1), starts[0], _STEPS))
    if heads == 1:
        return whole.expand(len(seeds), -1)
    alone = _top_output(outward, inward, starts[1:], _STEPS_ALONE)  # (heads, d_out)
    signs = torch.stack([torch.randint(2, (heads,), generator=stream(seed, "guess")) for seed in seeds]).to(inward) * 2 - 1
    return _unit(whole + _ALONE * _unit(signs @ alone))


def _mark(*weights: Tensor) -> int:
    """A number made of weights, roughly, so that it is the same in every precision and for every input."""
    mark = hashlib.blake2b(digest_size=6)
    for w in weights:
        some = w.flatten()[:: max(1, w.numel() // _SAMPLED)].double()
        mark.update((1e3 * some / some.abs().max().clamp_min(1e-300)).round().cpu().numpy().astype("int32").tobytes())
    return int.from_bytes(mark.digest(), "big")


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
    top = (vectors[..., -1:].mT @ images)[..., 0, :]
    largest = top.gather(-1, top.abs().argmax(-1, keepdim=True))
    return torch.where(largest < 0, -top, top)  # one sign for all starts


def _unit(v: Tensor) -> Tensor:
    length = v.norm(dim=-1, keepdim=True)
    return v / torch.where(length > 0, length, 1.0)
