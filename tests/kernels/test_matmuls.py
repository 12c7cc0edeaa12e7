"""How exact torch's own products are inside and outside, and what projections with eleven bits cost."""

import pytest
import torch

import howsmooth as hs
from howsmooth.kernels.tensors import float32_products
from howsmooth.maps import AttentionJacobian
from problems.layers import gaussian


@pytest.fixture
def initialized(monkeypatch: pytest.MonkeyPatch):
    if torch.cuda.is_available():
        torch.cuda.init()
    else:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_settings_come_back(before: str, initialized):
    torch.set_float32_matmul_precision(before)
    with float32_products():
        assert torch.get_float32_matmul_precision() == "highest"
        with float32_products(coarse=True):
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(ValueError, match="mine"), float32_products(coarse=True):
        raise ValueError("mine")
    assert torch.get_float32_matmul_precision() == before


def test_settings_under_newer_names_come_back(initialized):
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has the older names only")
    matmul.fp32_precision = "tf32"
    with float32_products():
        assert matmul.fp32_precision == "ieee"
    assert matmul.fp32_precision == "tf32"
    torch.set_float32_matmul_precision("highest")


def operator() -> AttentionJacobian:
    weights = [gaussian(256, 256, seed=i).float().cuda() / 16 for i in range(4)]
    attn = hs.Attention(weights[0], weights[1], weights[2], weights[3], heads=4, causal=True)
    found = attn.linearize(gaussian(600, 256, seed=9).float().cuda()[None])[1]
    assert isinstance(found, AttentionJacobian)
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_noise_covers_the_projections():
    coarse = operator()
    assert coarse.coarse
    exact = coarse.refined()
    assert exact is not None
    assert not exact.coarse
    truth = coarse.layer.to(torch.float64).linearize(gaussian(600, 256, seed=9).float().double().cuda()[None])[1]
    for seed in range(4):
        v = gaussian(1, 1, 600, 256, seed=20 + seed).float().cuda()
        want = truth.jvp(v.double())
        assert float((coarse.jvp(v) - want).norm() / want.norm()) <= 1.2 * coarse.noise
        assert float((exact.jvp(v) - want).norm() / want.norm()) <= 1.2 * exact.noise
    assert exact.noise < coarse.noise < 2e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tol", [1e-3, 1e-5])
def test_values_hold_whatever_torch_was_told(tol):
    attn, x = operator().layer, gaussian(600, 256, seed=9).float().cuda()
    truth = hs.lipschitz(attn.to(torch.float64), x.double(), tol=1e-7).value
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = hs.lipschitz(attn, x, tol=tol)
    finally:
        torch.set_float32_matmul_precision(before)
    assert abs(found.value - truth) <= tol * truth
    assert found.upper >= truth
