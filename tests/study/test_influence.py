"""The norms of all blocks of a layer's derivative, against the dense Jacobian."""

import warnings
from dataclasses import asdict

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.maps import AttentionJacobian
from howsmooth.solve import linear
from howsmooth.study import influence
from howsmooth.study.influence import _PROBE_WORK, _WORK, InfluenceRow, _probe_work, _work, exact, measure_influence, probed
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Part
from problems import readers
from problems.zoo import ZOO, randomize

N = 7


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def layer(**more) -> hs.Attention:
    """Four heads of queries, two of keys and values, of different widths."""
    w = {"w_q": normal(16, 5), "w_k": normal(8, 5, seed=1), "w_v": normal(6, 5, seed=2), "w_o": normal(9, 12, seed=3)}
    biases = {"b_q": normal(16), "b_k": normal(8), "b_v": normal(6), "b_o": normal(9)}
    return hs.Attention(**w, **biases, heads=4, kv_heads=2, **more)


def truth(f, x: torch.Tensor) -> torch.Tensor:
    n, d = x.shape
    dense = hs.jacobian(f, x).dense()
    return dense.reshape(n, -1, n, d).permute(0, 2, 1, 3).flatten(2).norm(dim=-1)


KINDS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "soft-cap": {"softcap": 2.0},
    "rotary": {"causal": True, "rotary": hs.Rotary.from_base(4, N)},
    "part rotary": {"rotary": hs.Rotary.from_base(2, N + 3, interleaved=True)},
    "normed": {"q_norm": hs.RMSNorm(normal(4)), "k_norm": hs.LayerNorm(normal(4, seed=5), normal(4, seed=6))},
    "everything": {
        "q_norm": hs.RMSNorm(normal(4)), "k_norm": hs.RMSNorm(normal(4, seed=5)), "rotary": hs.Rotary.from_base(4, N),
        "causal": True, "softcap": 3.0, "bias": normal(1, 4, N, N), "scale": 0.4,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0.3, 3.0])
def test_exact_norms_are_those_of_the_dense_blocks(kind, size):
    attn, x = layer(**KINDS[kind]), size * normal(N, 5, seed=9)
    jacobian = linear(attn, x)
    assert isinstance(jacobian, AttentionJacobian)
    torch.testing.assert_close(exact(jacobian), truth(attn, x), rtol=1e-7, atol=1e-7 * float(truth(attn, x).max()))


def test_single_tokens_missing_projections_and_padding():
    plain = hs.Attention(normal(4, 4), None, normal(4, 4, seed=1), None)
    for x in (normal(1, 4), normal(6, 4)):
        torch.testing.assert_close(exact(linear(plain, x)), truth(plain, x), rtol=1e-7, atol=1e-9)  # pyright: ignore
    padded = layer(attention_mask=torch.tensor([[True] * 5 + [False] * 2]))
    x = normal(N, 5)
    torch.testing.assert_close(exact(linear(padded, x)), truth(padded, x), rtol=1e-7, atol=1e-9)  # pyright: ignore


def test_a_batch_is_refused():
    with pytest.raises(BadInputError, match="one input"):
        exact(layer().linearize(normal(2, N, 5))[1])  # pyright: ignore


def test_probes_are_as_accurate_as_they_say():
    """Squares have the mean of the truth and a relative variance of at most 2/probes."""
    attn, x = layer(causal=True), normal(N, 5)
    known, J = truth(attn, x), linear(attn, x)
    there = known > 0
    ratios = torch.stack([(probed(J, seed) / known)[there].square() for seed in range(200)])
    assert bool((probed(J, 0)[~there] == 0).all())
    torch.testing.assert_close(ratios.mean(0), torch.ones_like(ratios[0]), rtol=0, atol=0.5 * 4.5 / 200**0.5)
    assert float(ratios.var(0).mean()) <= 2 / 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "exactly"), [("gpt2", True), ("llama", True), ("qwen3", True), ("olmo2", False), ("deberta-v2", False)]
)
def test_a_study_takes_the_longest_length_it_can_afford(name, exactly):
    """In closed form to 512 tokens, by probes to 64; the blocks are those of the model's own layer."""
    reader = Reader.of(hs.load(randomize(ZOO[name].build())), readers.ids())
    part = asdict(Part(20, (0,), 0, (1,), "attention", 1e-3, None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (cells,) = measure_influence(reader, part, lengths=[8, 20, 600])
        captured = reader.model.capture(ids=reader.window(20, 0))
        f = captured.map(1)
        known = truth(f, f.start)
    row = InfluenceRow.of(cells)
    assert (row.n, row.layer, row.sample) == (20, 1, 0)
    norms = torch.tensor(row.norms)
    assert row.accuracy == (0.0 if exactly else 0.25)
    torch.testing.assert_close(norms, known.to(norms), rtol=1e-3 if exactly else 2.0, atol=1e-4 * float(known.max()))


@pytest.mark.parametrize(
    ("lengths", "longest", "affordable", "taken"), [([20], 12, 12, 12), ([20], 20, 16, 16), ([18, 20], 20, 18, 18)]
)
def test_there_is_a_picture_whatever_the_lengths(monkeypatch: pytest.MonkeyPatch, lengths, longest, affordable, taken):
    reader = Reader.of(hs.load(randomize(ZOO["llama"].build())), readers.ids())
    attn = reader.model.capture(ids=reader.window(20, 0)).closed(1)
    assert attn is not None
    monkeypatch.setattr(influence, "_LONGEST", longest)
    monkeypatch.setattr(influence, "_WORK", {"cpu": _work(attn, affordable)})
    monkeypatch.setattr(influence, "_PROBED", 0)
    (cells,) = measure_influence(reader, asdict(Part(20, (0,), 0, (1,), "attention", 1e-3, None)), lengths=lengths)
    row = InfluenceRow.of(cells)
    assert (row.n, len(row.norms)) == (taken, taken)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_exact_norms_on_a_gpu(kind):
    attn, x = layer(**KINDS[kind]), normal(N, 5, seed=9)
    jacobian = linear(attn.to("cuda", torch.float32), x.to("cuda", torch.float32))
    assert isinstance(jacobian, AttentionJacobian)
    torch.testing.assert_close(exact(jacobian), truth(attn, x), rtol=1e-3, atol=1e-3 * float(truth(attn, x).max()))


def test_wide_layers_get_shorter_pictures():
    wide = hs.Attention(*torch.zeros(4, 1024, 1024).unbind(), heads=8, rotary=hs.Rotary.from_base(128, 512))
    assert _work(wide, 512) > _WORK["cpu"] > _work(wide, 64)
    assert _probe_work(4096, 64) > _PROBE_WORK > _probe_work(4096, 8)
