"""Where maps of models begin and end, in models around models that are known."""

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.program import Layers, record
from problems.modules import QUESTIONS
from problems.modules.base import seeded

D = 8
X = torch.randn(1, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Pooled(nn.Module):
    """Blocks, a norm, and what becomes of its tokens behind it."""

    def __init__(self, pool: str):
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks, self.norm, self.pool = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(D), pool

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.blocks(x))
        if self.pool == "mean":
            return x.mean(1, keepdim=True)
        return nn.functional.avg_pool1d(x.mT, 2, 1).mT if self.pool == "pairs" else x


@pytest.mark.parametrize("pool", ["mean", "pairs"])
def test_a_model_ends_behind_its_norm_and_before_it_is_pooled(pool: str):
    whole, plain = seeded(Pooled(pool)), seeded(Pooled("none"))
    expected = hs.load(plain).measure(inputs=X, layer=0, map="model").value
    assert hs.load(whole).measure(inputs=X, layer=0, map="model").value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["U-ViT · block 1", "two streams · block"])
def test_a_sequence_around_a_model_hides_none_of_its_blocks(name: str):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = nn.Sequential(nn.Identity(), QUESTIONS[name].build())

        def forward(self, *given: Tensor) -> Tensor:
            return self.steps[1](*(self.steps[0](t) for t in given))

    given = QUESTIONS[name].inputs()
    assert isinstance(given, tuple)
    alone = [layer.path for layer in Layers(record(QUESTIONS[name].build(), given)).found]
    inside = [layer.path for layer in Layers(record(Around(), given)).found]
    assert inside == [f"steps.1.{path}" for path in alone]


def test_one_stream_is_no_larger_than_all():
    """A branch that one matrix projects together with attention stays as it is in a map of one stream too."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.mlp = nn.ModuleList([nn.Linear(D, 3 * D), nn.Linear(D, 3 * D)]), nn.Linear(D, 6)
            self.out = nn.Linear(D + 6, D)

        def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.cat([self.qkv[0](x), self.qkv[1](c)], 1)
            q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in y.chunk(3, -1))
            out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            parts = zip(out.split([5, 3], 1), (x, c), strict=True)
            new = [t + self.out(torch.cat([o, self.mlp(t).relu()], -1)) for o, t in parts]
            return new[0], new[1]

    capture = hs.load(seeded(Two())).capture(inputs=[X, X[:, :3] + 1])
    whole = capture.measure(0).value
    assert max(capture.measure(0, stream=i).value for i in range(2)) <= whole * (1 + 1e-9)
