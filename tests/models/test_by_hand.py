"""Attention that is written out in a model's code: followed to the end or refused, never half."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from checks import PARITY
from howsmooth.models import FallbackWarning

N, D, HEADS = 6, 8, 2
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()
SLOPES = -0.3 * torch.arange(1.0, HEADS + 1)[:, None, None] * torch.arange(N, 0, -1.0)


class Written(nn.Module):
    """Softmax attention by hand, in one of many ways to write it."""

    def __init__(self, way: str):
        super().__init__()
        self.way = way
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v = self.qkv(hidden_states).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        way: Any = getattr(self, self.way)
        o = way(q, k, v)
        return self.out(o.transpose(1, 2).flatten(2))

    def plain(self, q, k, v):
        return self.dropout(torch.softmax(q @ k.transpose(-1, -2) / 2.0, -1)) @ v

    def masked(self, q, k, v):
        s = torch.matmul(q * 0.5, k.mT).masked_fill(~CAUSAL, torch.finfo(q.dtype).min)
        return torch.matmul(nn.functional.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype), v)

    def chosen(self, q, k, v):
        s = torch.where(CAUSAL, q @ k.mT, torch.tensor(-1e30, dtype=q.dtype)) * 0.5
        return s.softmax(3).type_as(q) @ v

    def floored(self, q, k, v):
        s = q @ k.mT + torch.zeros(N, N).to(q).masked_fill(~CAUSAL, torch.finfo(torch.float32).min)
        return torch.softmax(torch.max(s, torch.tensor(torch.finfo(torch.float32).min)), -1) @ v

    def raised(self, q, k, v):
        return torch.softmax(torch.max(q @ k.mT, torch.tensor(-0.1)), -1) @ v

    def alibi(self, q, k, v):
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        s = SLOPES.to(q).baddbmm(q, k.mT, beta=1.0, alpha=0.5).view(1, HEADS, N, N)
        s += torch.zeros(1, 1, N, N).to(q).masked_fill(~CAUSAL, -1e9)
        return torch.bmm(s.softmax(-1).view(HEADS, N, N), v).view(1, HEADS, N, -1)

    def inputs_bias(self, q, k, v):
        return torch.softmax(q @ k.mT + q.sum(-1)[..., None, :], -1) @ v

    def capped(self, q, k, v):
        return torch.softmax(torch.tanh(q @ k.mT), -1) @ v

    def over_queries(self, q, k, v):
        return torch.softmax(q @ k.mT, -2) @ v

    def reweighted(self, q, k, v):
        p = torch.softmax(q @ k.mT, -1)
        return (p / p.sum(-1, keepdim=True).square()) @ v

    def twice(self, q, k, v):
        p = torch.softmax(q @ k.mT, -1)
        return p @ (p @ v)


@pytest.mark.parametrize(
    ("way", "cut"),
    [("plain", True), ("masked", True), ("chosen", True), ("alibi", True), ("twice", True), ("floored", True)]
    + [("capped", True)]
    + [(way, False) for way in ("inputs_bias", "raised", "over_queries", "reweighted")],
)
def test_followed_or_refused(way: str, cut: bool):
    torch.manual_seed(0)
    module = nn.Sequential(Written(way)).double().eval()
    for p in module.parameters():
        p.data.normal_(0, 0.6)
    x = torch.randn(1, N, D, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(module, x)
    assert isinstance(jacobian, Tensor)
    truth = float(torch.linalg.matrix_norm(jacobian.reshape(N * D, N * D), 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        capture = hs.load(module).capture(inputs=x)
        got = capture.measure(0)
        closed = capture.closed(0)
    assert got.value == pytest.approx(truth, rel=PARITY)
    assert got.cut == cut
    assert any(issubclass(w.category, FallbackWarning) for w in caught) != cut
    assert (closed is not None) == (cut and way != "twice")
    if closed is not None:
        assert hs.lipschitz(closed, x[0]).value == pytest.approx(truth, rel=PARITY)
