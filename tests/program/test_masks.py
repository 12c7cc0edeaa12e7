"""Masks are read for what they are, and losing one never goes unnoticed."""

from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor

import howsmooth as hs
from howsmooth.kernels import Mask
from howsmooth.models import FallbackWarning
from howsmooth.program import masks
from problems.zoo import GROUPED, TOKENS, ids, randomize

CPU = torch.device("cpu")


def rule_of(causal: bool, window: int | None):
    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k <= q) if causal else (k <= k) & (q >= 0)
        return seen if window is None else seen & ((q - k).abs() < window)

    return rule


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("padded", [False, True])
def test_bands_are_recognised(causal: bool, window: int | None, padded: bool):
    n = 7
    keys = torch.ones(2, n, dtype=torch.bool)
    keys[1, -2:] = not padded
    found = masks.of_rule(rule_of(causal, window), 2, n, n, keys, CPU)
    assert found.bias is None
    assert (found.keys is None) != padded
    whole = slice(0, n)
    want = Mask(causal, window).visible(whole, whole, CPU)
    assert torch.equal(found.visible(whole, whole, CPU), want)
    seen = want[None, None] & keys[:, None, None]
    for mask in (seen, torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)):
        read = masks.of_tensor(mask, torch.float32)
        assert torch.equal(shown(read, n), seen)


def shown(mask: Mask, n: int) -> Tensor:
    seen = mask.visible(slice(0, n), slice(0, n), CPU)[None, None]
    seen = seen if mask.keys is None else seen & mask.keys[:, None, None]
    return (seen if mask.bias is None else seen & (mask.bias == 0)).expand(2, 1, n, n)


def test_other_rules_become_a_bias():
    rule = lambda b, h, q, k: (k // 3 == q // 3) & (k <= q)  # noqa: E731
    found = masks.of_rule(rule, 1, 7, 7, None, CPU)
    assert found.bias is not None
    i = torch.arange(7)
    assert torch.equal(found.bias[0, 0] == 0, rule(0, 0, i[:, None], i[None]))
    assert torch.equal(found.bias[0, 0] == -torch.inf, ~rule(0, 0, i[:, None], i[None]))


def test_a_real_bias_stays_one():
    bias = torch.randn(1, 2, 4, 4)
    found = masks.of_tensor(bias, torch.float64).bias
    assert found is not None
    assert torch.equal(found, bias.double())


def gemma(**options) -> t.Gemma2Model:
    config: dict[str, Any] = {"sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 6, **options}
    model = randomize(t.Gemma2Model(t.Gemma2Config(**GROUPED, **TOKENS, **config))).double()
    assert isinstance(model, t.Gemma2Model)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "layer"),
    [({"sliding_window": 64}, 0), ({"attn_logit_softcapping": None}, 0), ({"attn_logit_softcapping": None}, 1)],
)
def test_window_and_softcap_change_the_number(options: dict, layer: int):
    with_it = hs.load(gemma()).capture(ids=ids()).map(layer)
    without = hs.load(gemma(**options)).capture(ids=ids()).map(layer)
    x = with_it.start
    assert abs(hs.lipschitz(with_it, x).value / hs.lipschitz(without, x).value - 1) > 1e-4  # decomposed: exact to 1e-12


def test_a_padding_mask_changes_the_number():
    model = hs.load(gemma())
    hidden = [i != 3 for i in range(ids().shape[1])]
    with_it, without = model.capture(ids=ids(), mask=hidden).map(1), model.capture(ids=ids()).map(1)
    x = without.start
    inner = torch.cat([x[:3], x[4:]])

    def visible(t: Tensor) -> Tensor:  # the token is seen, not moved
        y = without(torch.cat([t[:3], x[3:4], t[3:]]))
        return torch.cat([y[:3], y[4:]])

    rest = hs.lipschitz(visible, inner)
    assert abs(hs.lipschitz(with_it, inner).value / rest.value - 1) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["window", "keys"])
def test_a_missing_mask_is_noticed(loss: str, monkeypatch: pytest.MonkeyPatch):
    """With one part of the mask thrown away on the way to the kernels, the model's own code is recorded and is right."""
    mask = [True] * (ids().shape[1] - 1) + [False]
    mask = mask if loss == "window" else [i != 3 for i in range(len(mask))]
    model = hs.load(gemma(attn_implementation="eager"))
    truth = model.measure(ids=ids(), mask=mask, layer=1)
    read = masks.of_rule
    lost = {
        "window": lambda *a: Mask(read(*a).causal, None, read(*a).keys),
        "keys": lambda *a: Mask(read(*a).causal, read(*a).window),
    }
    monkeypatch.setattr(masks, "of_rule", lost[loss])
    again = hs.load(gemma(attn_implementation="eager"))
    assert again.measure(ids=ids(), mask=mask, layer=1).value == pytest.approx(truth.value, rel=1e-5)


@pytest.mark.slow
def test_a_mask_that_is_misread_leaves_attention_in_its_own_operations(monkeypatch: pytest.MonkeyPatch):
    model = hs.load(gemma(attn_implementation="eager"))
    truth = model.measure(ids=ids(), layer=0)
    read = masks.of_rule, masks.of_tensor
    monkeypatch.setattr(masks, "of_rule", lambda *a: Mask(read[0](*a).causal))
    monkeypatch.setattr(masks, "of_tensor", lambda *a: Mask(read[1](*a).causal))
    with pytest.warns(FallbackWarning):
        got = hs.load(gemma(attn_implementation="eager")).measure(ids=ids(), layer=0)
    assert not got.cut
    assert got.value == pytest.approx(truth.value, rel=1e-5)
