"""The plain reference against torch's own attention, and against the definition."""

import math

import pytest
import torch
import torch.nn.functional as F

from checks import assert_close
from howsmooth.kernels import Mask, plain_attention
from problems.layers import MASK_NAMES, gaussian, masks, problem


def visible(mask: Mask, batch: int, heads: int, n: int) -> torch.Tensor:
    """Visibility from the definition, one logit at a time."""
    seen = torch.ones(batch, heads, n, n, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for i in range(n):
                for j in range(n):
                    hidden = mask.causal and j > i
                    hidden |= mask.ends is not None and j >= int(mask.ends[i])
                    hidden |= mask.window is not None and abs(i - j) >= mask.window
                    hidden |= mask.keys is not None and not bool(mask.keys[b, j])
                    if mask.bias is not None:
                        s = mask.bias.shape
                        entry = mask.bias[b if s[0] > 1 else 0, h if s[1] > 1 else 0, i if s[2] > 1 else 0, j]
                        hidden |= float(entry) == -math.inf
                    seen[b, h, i, j] = not hidden
    return seen


@pytest.mark.parametrize("name", MASK_NAMES)
def test_equals_torch(name):
    mask = masks(2, 2, 5)[name]
    p = problem(n=5, mask=mask)
    seen = visible(mask, 2, 2, 5)
    added = torch.zeros(2, 2, 5, 5).double() if mask.bias is None else mask.bias.expand(2, 2, 5, 5)
    truth = F.scaled_dot_product_attention(*p.qkv, attn_mask=added.masked_fill(~seen, -torch.inf), scale=p.scores.scale)
    truth = truth.where(seen.any(-1, keepdim=True), 0.0)
    assert_close(p.value(*p.qkv), truth)


def test_grouped_heads_equal_torch():
    p = problem(heads=6, kv_heads=2, n=5)
    assert_close(p.value(*p.qkv), F.scaled_dot_product_attention(*p.qkv, scale=p.scores.scale, enable_gqa=True))


def test_softcap_is_the_formula():
    p = problem(batch=1, heads=1, softcap=0.7, logit=9.0)
    s = 0.7 * torch.tanh(p.scores.scale * p.q @ p.k.mT / 0.7)
    assert_close(p.value(*p.qkv), torch.softmax(s, -1) @ p.v)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 100])
def test_blocks_of_rows_change_nothing(rows):
    p = problem(n=7, mask=masks(2, 2, 7)["everything"])
    assert_close(plain_attention(*p.qkv, p.scores, rows=rows), p.value(*p.qkv))


def test_hidden_rows_have_zero_gradient():
    p = problem(n=6, mask=masks(2, 2, 6)["lost rows"])
    q, k, v = (t.clone().requires_grad_() for t in p.qkv)
    out = p.value(q, k, v)
    out.backward(gaussian(*out.shape, seed=1))
    assert torch.equal(out[:, :, [0, 5]], torch.zeros_like(out[:, :, [0, 5]]))
    assert q.grad is not None
    assert bool(q.grad.isfinite().all())
    assert not bool(q.grad[:, :, [0, 5]].any())
    assert bool(q.grad[:, :, 1:5].any())
