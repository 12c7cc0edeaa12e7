"""Who reads how an answer comes about walks through so many functions in so many files of the package, and no more."""

from collections.abc import Callable

import pytest
import torch
from benchmarks.walk import walk

import howsmooth as hs


@pytest.mark.parametrize(
    ("question", "functions", "files"),
    [
        (lambda attn, x: hs.lipschitz(attn, x), 180, 26),
        (lambda attn, x: hs.lipschitz(attn, x, within=0.1), 350, 37),
    ],
    ids=["at an input", "around it"],
)
def test_a_reader_walks_through_few_functions(
    question: Callable[[hs.Attention, torch.Tensor], object], functions: int, files: int
):
    w_q, w_k, w_v, w_o = torch.randn(4, 8, 8).mul(8**-0.5)
    attn, x = hs.Attention(w_q, w_k, w_v, w_o), torch.randn(64, 8)
    question(attn, x[:50])  # what is set up once a process is not walked through again
    there = walk(lambda: question(attn, x))
    assert there["functions"] <= functions, there
    assert there["files"] <= files, there


def test_a_walk_counts_functions_and_files():
    there = walk(lambda: hs.Ball(1.0))
    assert (there["functions"], there["files"]) == (3, 2)  # its check, a length and a number
