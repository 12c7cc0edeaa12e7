"""The gate for settings: what passes comes out as Python's own, what does not is one sentence."""

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from howsmooth.errors import BadInputError
from howsmooth.settings import choice, flag, items, number, seed_of, shown, whole, words

SAYS = ("a value", "pass another")


@pytest.mark.parametrize("value", [2, 2.0, np.int64(2), np.uint8(2), np.float32(2), np.float64(2), Fraction(4, 2)])
def test_numbers(value: Any):
    got = number(value, *SAYS)
    assert got == 2.0
    assert type(got) is float


@pytest.mark.parametrize(
    "value",
    [None, True, np.True_, "2", b"2", 2j, Decimal(2), [2.0], np.array(2.0), torch.tensor(2.0), math.nan, math.inf, 10**400],
)
def test_what_is_no_number(value: Any):
    with pytest.raises(BadInputError, match=r"expected a value, got .*; pass another"):
        number(value, *SAYS)


def test_ends_of_a_range():
    assert number(0, *SAYS, least=0) == 0
    assert whole(0, *SAYS) == 0
    for refused in (
        lambda: number(0, *SAYS, above=0),
        lambda: number(1, *SAYS, below=1),
        lambda: number(-1e-300, *SAYS, least=0),
        lambda: whole(-1, *SAYS),
        lambda: whole(3, *SAYS, below=3),
    ):
        with pytest.raises(BadInputError):
            refused()


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3)])
def test_whole_numbers(value: Any):
    assert whole(value, *SAYS) == seed_of(value) == 3
    assert type(whole(value, *SAYS)) is int


@pytest.mark.parametrize("value", [3.0, np.float64(3), True, "3", None, torch.tensor(3), 2**63, Fraction(3)])
def test_what_is_no_whole_number(value: Any):
    with pytest.raises(BadInputError):
        whole(value, *SAYS)


def test_flags():
    assert flag(np.True_, "causal") is True
    assert flag(False, "causal") is False
    for value in ("False", 0, 1, None, [], torch.tensor(True)):
        with pytest.raises(BadInputError, match="expected causal as True or False"):
            flag(value, "causal")


def test_words():
    assert words("Ωmega \U0001f40c", *SAYS) == "Ωmega \U0001f40c"
    for value in ("a \ud800", "\udcff", b"a", None, 3):
        with pytest.raises(BadInputError) as caught:
            words(value, *SAYS)
        str(caught.value).encode()


def test_choices():
    assert choice("b", "a letter", ("a", "b")) == "b"
    for value in ("c", None, ["a"], {}, np.array(["a", "b"]), torch.ones(2)):
        with pytest.raises(BadInputError, match="expected a letter among a, b"):
            choice(value, "a letter", ("a", "b"))


@pytest.mark.parametrize("make", [list, tuple, iter, np.array, torch.tensor])
def test_items(make: Callable[[list[int]], Any]):
    assert [int(i) for i in items(make([1, 2]), *SAYS)] == [1, 2]


@pytest.mark.parametrize("value", [3, None, "12", b"12", {1: 2}, np.array(1), torch.tensor(1), torch.ones(2).to("meta")])
def test_what_is_no_list(value: Any):
    with pytest.raises(BadInputError):
        items(value, *SAYS)


@pytest.mark.parametrize(
    "value", [10**9999, "x" * 9999, "a\nb", "\ud800", object(), torch.ones(99), math.nan, [1] * 99], ids=range(8)
)
def test_what_is_shown_is_short_and_one_line(value: Any):
    text = shown(value)
    assert 0 < len(text) <= 40
    assert "\n" not in text
    text.encode()
