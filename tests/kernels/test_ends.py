"""Causal masks with ties: `ends` says how far each row sees."""

import pytest
import torch

from checks import assert_close
from howsmooth.errors import BadInputError
from howsmooth.kernels import Blocked, Dense, Mask, TileSize, plain_attention
from howsmooth.kernels.base import cut
from problems.layers import gaussian, problem, ties


@pytest.mark.parametrize("n", [1, 2, 7, 40, 111])
@pytest.mark.parametrize("shift", [0, -2])
@pytest.mark.parametrize("size", [TileSize(2, 3, leaf=1), TileSize(16, 8, leaf=4), TileSize()], ids=str)
def test_tiles_cover_what_is_visible_once_and_nothing_else_whole(n, shift, size):
    mask = Mask(ends=(ties(n) + shift).clamp_min(0))
    count = torch.zeros(n, n, dtype=torch.long)
    for tile in cut(n, n, mask, size):
        seen = mask.visible(tile.rows, tile.cols, torch.device("cpu"))
        assert tile.partial or bool(seen.all())
        count[tile.rows, tile.cols] += seen.long()
    assert mask.ends is not None
    truth = torch.arange(n)[None] < mask.ends[:, None]
    assert torch.equal(count, truth.long())


@pytest.mark.parametrize("kind", [Dense, Blocked])
def test_ends_without_ties_are_the_causal_mask(kind):
    p = problem(n=23, mask=Mask(causal=True))
    q = problem(n=23, mask=Mask(ends=torch.arange(1, 24)))
    assert_close(q.kernel(kind).output, p.kernel(kind).output)
    assert_close(q.value(*q.qkv), p.value(*p.qkv))


@pytest.mark.parametrize("kind", [Dense, Blocked])
def test_more_keys_than_queries(kind):
    p = problem(n=3, m=9, mask=Mask(ends=torch.tensor([2, 5, 9])))
    kernel = p.kernel(kind, TileSize(2, 2, leaf=1))
    for i, end in enumerate((2, 5, 9)):
        alone = plain_attention(p.q[:, :, i : i + 1], p.k[:, :, :end], p.v[:, :, :end], problem(n=1, m=end).scores)
        assert_close(kernel.output[:, :, i : i + 1], alone)


@pytest.mark.parametrize(
    ("ends", "n"), [([2, 1, 3], 3), ([1, 2], 3), ([1, 2, 4], 3), ([-1, 2, 3], 3)], ids=["falls", "few", "far", "negative"]
)
def test_refused(ends, n):
    x = gaussian(1, 1, n, 2, seed=0)
    with pytest.raises(BadInputError, match=r"^expected .*ends"):
        Mask(ends=torch.tensor(ends)).check(1, 1, n, x.shape[2])
