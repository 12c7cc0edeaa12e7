"""A layer's weights head by head, in float64, and norms rounded up."""

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.maps import Attention


def split(layer: Attention) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Per query head, in float64: W_q, W_k, W_v, (heads, width, d), and b_q, b_k, (heads, width)."""
    kv_heads = layer.kv_heads
    group = layer.heads // kv_heads
    eye = torch.eye(layer.width, dtype=torch.float64, device=layer.w_q.device)
    w_k = eye if layer.w_k is None else layer.w_k.double()
    q = layer.w_q.double().unflatten(0, (layer.heads, -1))
    k = w_k.unflatten(0, (kv_heads, -1)).repeat_interleave(group, 0)
    v = layer.w_v.double().unflatten(0, (kv_heads, -1)).repeat_interleave(group, 0)
    b_q = q.new_zeros(q.shape[:2]) if layer.b_q is None else layer.b_q.double().unflatten(0, (layer.heads, -1))
    b_k = (
        k.new_zeros(k.shape[:2])
        if layer.b_k is None
        else layer.b_k.double().unflatten(0, (kv_heads, -1)).repeat_interleave(group, 0)
    )
    return q, k, v, b_q, b_k


def outputs_of(layer: Attention) -> Float[Tensor, "heads d_out d_v"]:
    """`W_o^h`: the columns of the output projection that head h meets."""
    d_v = layer.w_v.shape[0] // layer.kv_heads
    if layer.w_o is None:
        eye = torch.eye(layer.heads * d_v, dtype=torch.float64, device=layer.w_v.device)
        return eye.unflatten(1, (layer.heads, d_v)).transpose(0, 1)
    return layer.w_o.double().unflatten(1, (layer.heads, d_v)).transpose(0, 1)


def norm(m: Float[Tensor, "*batch r c"]) -> Float[Tensor, "*batch"]:
    return torch.linalg.matrix_norm(m, ord=2)


def slack(size: int) -> float:
    """1 plus the relative error of a float64 norm of matrices of that size: products and a backward stable SVD."""
    return 1 + 64 * torch.finfo(torch.float64).eps * max(size, 16)


def up(values: Tensor, size: int) -> tuple[float, ...]:
    return tuple(float(x) * slack(size) for x in values.flatten())
