"""Tiles cover what is seen, once, and skip what is not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from howsmooth.kernels import Mask, TileSize
from howsmooth.kernels.base import cut

lengths = st.integers(1, 70)
bands = st.builds(Mask, causal=st.booleans(), window=st.none() | st.integers(1, 80))
sizes = st.builds(TileSize, rows=st.integers(1, 40), cols=st.integers(1, 40), leaf=st.integers(1, 40))


def check_cut(n: int, m: int, mask: Mask, size: TileSize) -> None:
    seen = mask.visible(slice(0, n), slice(0, m), torch.device("cpu"))
    covered = torch.zeros(n, m, dtype=torch.int64)
    for tile in cut(n, m, mask, size):
        block = seen[tile.rows, tile.cols]
        assert block.numel() > 0
        assert block.shape[0] <= size.rows
        assert block.shape[1] <= size.cols
        assert bool(block.any()), "a tile that no query sees"
        assert bool(block.all()) != tile.partial, "partial is for tiles that the band cuts"
        covered[tile.rows, tile.cols] += 1
    assert bool((covered[seen] == 1).all())
    assert int(covered.max()) == 1


@pytest.mark.slow
@settings(max_examples=200)
@given(lengths, bands, sizes)
def test_square(n, mask, size):
    check_cut(n, n, mask, size)


@pytest.mark.slow
@settings(max_examples=100)
@given(lengths, lengths, sizes)
def test_rectangular(n, m, size):
    check_cut(n, m, Mask(), size)


@settings(max_examples=200)
@given(lengths, lengths, bands, st.data())
def test_band_says_what_visible_says(n, m, mask, data):
    start = data.draw(st.integers(0, 70))
    rows, cols = slice(start, start + n), slice(data.draw(st.integers(0, 70)), 70 + m)
    seen = mask.visible(rows, cols, torch.device("cpu"))
    assert mask.band(rows, cols) == (True if bool(seen.all()) else None if bool(seen.any()) else False)


def area(n: int, mask: Mask, size: TileSize) -> int:
    return sum((t.rows.stop - t.rows.start) * (t.cols.stop - t.cols.start) for t in cut(n, n, mask, size))


@pytest.mark.parametrize("n", [1024, 1000, 4096])
def test_causal_costs_half(n):
    size = TileSize()
    assert n * (n + 1) / 2 <= area(n, Mask(causal=True), size) <= n * (n + 2 * size.leaf) / 2
    assert area(n, Mask(), size) == n * n


def test_a_window_costs_its_width():
    n, size = 4096, TileSize()
    assert area(n, Mask(causal=True, window=128), size) <= n * (128 + 2 * size.leaf)


def test_default_sizes_fit_the_device():
    assert TileSize.on(torch.device("cpu")) == TileSize()
    assert TileSize.on(torch.device("cuda")).elements > TileSize().elements
