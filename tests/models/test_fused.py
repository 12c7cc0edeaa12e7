"""Real models on the fused kernels: their products are coarser, and the estimate knows it."""

import pytest
import torch

import howsmooth as hs
from howsmooth.kernels import autograd, linearize
from howsmooth.kernels.base import Precision

pytest.importorskip("triton", reason="needs triton: pip install triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def fused(monkeypatch):
    def below_float64(q, k, v, scores, kernel, precision: Precision):
        return linearize(q, k, v, scores, "auto" if q.dtype == torch.float64 else "triton", precision)

    monkeypatch.setattr(autograd, "linearize", below_float64)


@pytest.mark.slow
@pytest.mark.parametrize(("tol", "coarse"), [(1e-2, True), (1e-5, False)])
def test_products_as_fine_as_asked(fused, tol, coarse):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 2, batch_first=True).eval().to(DEVICE)
    model = hs.load(layer)
    x = torch.randn(1, 24, 32, device=DEVICE)
    found = model.measure(inputs=x, layer=0, tol=tol).estimate
    truth = hs.load(layer.double()).measure(inputs=x.double(), layer=0, tol=1e-6).estimate
    assert (found.noise > 1e-4) == coarse
    assert abs(found.value - truth.value) <= tol * truth.value
    assert found.lower <= truth.upper * (1 + 1e-9)
    assert truth.lower <= found.upper * (1 + 1e-9)
