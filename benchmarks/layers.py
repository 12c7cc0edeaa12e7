"""The layers that are measured."""

import torch
from torch import Tensor

import howsmooth as hs

WIDTH, HEADS = 768, 12


def gpt2_layer(n: int, causal: bool, seed: int = 0) -> tuple[hs.Attention, Tensor]:
    """An attention layer of GPT-2's size and initialisation (standard deviation 0.02), and normalised tokens."""
    random = torch.Generator().manual_seed(seed)
    weights = [0.02 * torch.randn(WIDTH, WIDTH, generator=random) for _ in range(4)]
    return hs.Attention(*weights, heads=HEADS, causal=causal), torch.randn(n, WIDTH, generator=random)


def small_layer(batch: int, n: int, width: int, heads: int, seed: int = 0) -> tuple[hs.Attention, Tensor]:
    """A layer with weights of standard deviation 1/√width, and a batch of normalised tokens."""
    random = torch.Generator().manual_seed(seed)
    weights = [width**-0.5 * torch.randn(width, width, generator=random) for _ in range(4)]
    return hs.Attention(*weights, heads=heads), torch.randn(batch, n, width, generator=random)


def plain(layer: hs.Attention, n: int):
    """The same layer as a user would write it in torch."""
    hidden = ~torch.ones(n, n, dtype=torch.bool).tril() if layer.causal else None

    def f(x: Tensor) -> Tensor:
        q, k, v = (
            (x @ w.T).unflatten(-1, (layer.heads, -1)).transpose(-3, -2)
            for w in (layer.w_q, layer.w_k, layer.w_v)
            if w is not None
        )
        s = q @ k.mT / (layer.w_q.shape[0] // layer.heads) ** 0.5
        if hidden is not None:
            s = s.masked_fill(hidden, -torch.inf)
        out = (s.softmax(-1) @ v).transpose(-3, -2).flatten(-2)
        return out if layer.w_o is None else out @ layer.w_o.T

    return f
