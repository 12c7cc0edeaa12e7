"""Reports whose every number is known: a layer that jumps threefold through one head, and text that means harm."""

import math
import random

from howsmooth.report.data import (
    BoundRow,
    HeadMeasurement,
    Measurement,
    Methods,
    Passage,
    ReportData,
    SplitRow,
    Token,
    WorstRow,
)

LENGTHS = (8, 16, 32, 64, 128, 136, 256, 512)
METHODS = Methods(
    model="a model",
    text="a text",
    map="attention",
    command="howsmooth report 'a model' --seed 7",
    versions={"howsmooth": "0.1.0", "torch": "2"},
    seed=7,
    date="2024-05-01",
    seconds=12.0,
)
HOSTILE = (
    "<script>window.harmed = true</script>",
    "<img src=x onerror='window.harmed = true'>",
    "</script><b>bold</b>",
    "\"double\" 'single' `back` ${window.harmed = true}",
    "&lt;already&amp;escaped&gt;",
    "🦊👩‍👩‍👧‍👦",
    "שלום עולם",
    "مرحبا",
    "x" * 10_000,
    "line\u2028and\u2029paragraph",
    "nul\x01and\ttab",
    "-->",
    "]]>",
    "\ud83d",  # half a surrogate pair, as a careless tokenizer cuts it
)


def value(layer: int, n: int) -> float:
    """`n^0.2`, and threefold in layer 0 past 128 tokens."""
    return (2 + layer) * n**0.2 * (3 if layer == 0 and n > 128 else 1)


def measurements(layers: int = 4, samples: int = 6, lengths: tuple[int, ...] = LENGTHS) -> tuple[Measurement, ...]:
    noise = random.Random(0)
    rows = []
    for layer in range(layers):
        for n in lengths:
            for sample in range(samples):
                found = value(layer, n) * math.exp(noise.gauss(0, 0.03))
                rows.append(Measurement(layer, n, sample, found, 1.2 * found, 0.999999, "converged", 9.0 + layer, 0.25, 7))
    return tuple(rows)


def heads(layers: int = 4, count: int = 5, lengths: tuple[int, ...] = (128, 136)) -> tuple[HeadMeasurement, ...]:
    """Head 2 of layer 0 alone carries the jump."""
    return tuple(
        HeadMeasurement(layer, head, n, 1.0 + head + (9.0 if (layer, head) == (0, 2) and n > 128 else 0.0))
        for layer in range(layers)
        for head in range(count)
        for n in lengths
    )


def passage(words: tuple[str, ...], layers: int = 4) -> Passage:
    """Layer k puts half of its worst direction on token k."""
    tokens = tuple(Token(word, " " if i else "", special=i == 0) for i, word in enumerate(words))
    rest = 0.5 / max(len(words) - 1, 1)
    return Passage(tokens, {k: [0.5 if i == k else rest for i in range(len(words))] for k in range(min(layers, len(words)))})


def bounds(layers: int = 4) -> tuple[BoundRow, ...]:
    rows = []
    for layer in range(layers):
        for n in (128, 512):
            L = value(layer, n)
            rows += [
                BoundRow(layer, n, "point", "D6", "at a point", "upper", math.log(5 * L), L, "L ≤ …", "a paper"),
                BoundRow(layer, n, "ball", "B7", "√n", "upper", math.log(900 * L), L, "L ≤ …", "a paper"),
                BoundRow(layer, n, "ball", "B8m", "mean field", "upper", 888.0, L, "L ≤ …", "a paper"),
                BoundRow(layer, n, "ball", "B2", "from below", "lower", math.log(L / 40), L, "L ≥ …", "a paper"),
                BoundRow(layer, n, "ball", "B4", "one head", "upper", None, L, "L ≤ …", "a paper", "it has several heads"),
            ]
    return tuple(rows)


def full(**changes) -> ReportData:
    """Every part of a report."""
    words = tuple(f"word{i}" for i in range(136))
    parts = {
        "measurements": measurements(),
        "methods": METHODS,
        "heads": heads(),
        "passages": (passage(words[:128]), passage(words)),
        "bounds": bounds(),
        "splits": tuple(SplitRow(k, 128, 10.0, 8.0 + k) for k in range(4)),
        "worst": tuple(WorstRow(k, 128, 9.0, 5.0 + k, 50.0, math.log(4000) if k else None, "ascent") for k in range(4)),
        "notes": ("Position embeddings past 128 were never tuned.",),
    }
    return ReportData(**(parts | changes))


def harmful() -> ReportData:
    """Hostile text in every place where text can stand."""
    bad = HOSTILE[0] + HOSTILE[3]
    methods = Methods(bad, bad, bad, bad, {bad: bad, "howsmooth": bad}, date=bad)
    rows = tuple(BoundRow(0, 8, "point", bad, bad, "upper", 5.0 if k else None, 3.0, bad, bad, bad) for k in range(2))
    found = tuple(Measurement(m.layer, m.n, m.sample, m.value, m.upper, 0.5, bad, m.radius) for m in measurements(2, 1))
    worst = (WorstRow(0, 8, 1.0, 2.0, 3.0, 4.0, bad),)
    return ReportData(found, methods, (), (passage(HOSTILE, 3),), rows, (), worst, (bad,), bad)
