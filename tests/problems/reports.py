"""Reports whose every number is known: a layer that jumps threefold through one head, and text that means harm."""

import math
import random
from typing import Any

from howsmooth.report import Methods, ReportData

Row = dict[str, Any]
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
NOTE = "Position embeddings past 128 were never tuned."
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


def row(kind: str, layer: int, n: int, value: float, **more) -> Row:
    return {"kind": kind, "layer": layer, "n": n, "value": value, **more}


def zeros(lengths: tuple[int, ...] = (8, 16)) -> list[Row]:
    """A layer that maps everything to one point, measured densely."""
    rest = {"sample": 0, "upper": 0.0, "confidence": 1.0, "status": "dense", "radius": 1.0}
    return [row("layer", 0, n, 0.0, **rest) for n in lengths]


def layers(count: int = 4, samples: int = 6, lengths: tuple[int, ...] = LENGTHS) -> list[Row]:
    noise = random.Random(0)
    rows = []
    for layer in range(count):
        for n in lengths:
            for sample in range(samples):
                L = value(layer, n) * math.exp(noise.gauss(0, 0.03))
                rest = {
                    "sample": sample,
                    "upper": 1.2 * L,
                    "confidence": 0.999999,
                    "status": "converged",
                    "radius": 9.0 + layer,
                }
                more = {"seconds": 0.25, "seed": 7, "model": "a model", "map": "attention", "relative": 2.0 + layer}
                rows.append(row("layer", layer, n, L, **rest, **more))
    return rows


def heads(count: int = 4, each: int = 5, lengths: tuple[int, ...] = (128, 136)) -> list[Row]:
    """Head 2 of layer 0 alone carries the jump."""
    return [
        row("head", layer, n, 1.0 + head + (9.0 if (layer, head) == (0, 2) and n > 128 else 0.0), head=head)
        for layer in range(count)
        for head in range(each)
        for n in lengths
    ]


def tokens(words: tuple[str, ...]) -> list[tuple[str, str, bool]]:
    return [(" " if i else "", word, i == 0) for i, word in enumerate(words)]


def with_shares(rows: list[Row], lengths: tuple[int, ...]) -> list[Row]:
    """The same rows; on the first sample at these lengths layer k puts half of its worst direction on token k."""

    def shares(layer, n):
        return [0.5 if i == layer else 0.5 / max(n - 1, 1) for i in range(n)]

    there = [r["n"] in lengths and r["sample"] == 0 for r in rows]
    return [r | {"shares": shares(r["layer"], r["n"])} if yes else r for r, yes in zip(rows, there, strict=True)]


def bound(where: str, id: str, name: str, side: str, log_value: float | None, reason: str | None = None) -> Row:
    text = {"statement": "L ≤ …", "source": "a paper", "reason": reason}
    return {"where": where, "id": id, "name": name, "side": side, "log_value": log_value, **text}


def bounds(count: int = 4) -> list[Row]:
    rows = []
    for layer in range(count):
        for n in (128, 512):
            L = value(layer, n)
            parts = [
                bound("point", "D6", "at a point", "upper", math.log(5 * L)),
                bound("ball", "B7", "√n", "upper", math.log(900 * L)),
                bound("ball", "B8m", "mean field", "upper", 888.0),
                bound("ball", "B2", "from below", "lower", math.log(L / 40)),
                bound("ball", "B4", "one head", "upper", None, "it has several heads"),
            ]
            rows.append(row("bounds", layer, n, L, bounds=parts))
    return rows


def splits(count: int = 4) -> list[Row]:
    return [row("splitting", k, 128, 8.0 + k, moved=10.0) for k in range(count)]


def worst(count: int = 4) -> list[Row]:
    ceilings = [None, *(math.log(4000) for _ in range(1, count))]
    return [
        row("worst", k, 128, 50.0, radius_max=9.0, text=5.0 + k, log_ceiling=log, how="ascent")
        for k, log in enumerate(ceilings)
    ]


def held(count: int = 4, n: int = 512, sink: bool = False) -> list[Row]:
    """The token that leads in layer k is token k, with half of the direction; of a sink, token 0 with nearly all of it."""
    top = {"share": 0.97, "received": 0.6, "word": "[CLS]"} if sink else {"share": 0.5, "received": 0.1, "word": "word"}
    return [
        row("held", k, n, value(k, n) / (20 if sink else 1.25), token=0 if sink else k, whole=value(k, n), **top)
        for k in range(count)
    ]


def yardsticks(count: int = 4, n: int = 512) -> list[Row]:
    """Ten times the constant of averaging in layer 0, five times elsewhere; a random change grows by a tenth of L."""
    return [
        row("yardstick", k, n, value(k, n), averaging=value(k, n) / (10 if k == 0 else 5), gain=value(k, n) / 10, logits=12.0)
        for k in range(count)
    ]


def maps(count: int = 4, n: int = 512) -> list[Row]:
    """Normed attention and blocks; a block is 50 times as smooth as its attention in layer 1, 5 times elsewhere."""
    gains = {"normed": 2, "block": 5}
    return [
        row("map", k, n, value(k, n) / (50 if (name, k) == ("block", 1) else gain), map=name, relative=1.0 + k)
        for k in range(count)
        for name, gain in gains.items()
    ]


def near(count: int = 4, n: int = 16) -> list[Row]:
    """Within r of a token's length, `1 + r` times is attained and `1 + 1000 r` times is certified; nothing past 0.1."""
    within = [1e-4, 1e-3, 1e-2, 1.0]
    rows = []
    for k in range(count):
        L = value(k, n)
        upper = [(1 + 1000 * r) * L if r < 0.1 else None for r in within]
        rows.append(row("near", k, n, L, size=10.0, within=within, lower_ends=[(1 + r) * L for r in within], upper_ends=upper))
    return rows


def changes(count: int = 4, samples: int = 3, n: int = 16) -> list[Row]:
    """Certified radii of 0.001 (1 + sample) of a token's length, twice that to first order, ten times for an attack."""
    rows = []
    for k in range(count):
        for sample in range(samples):
            r = 0.01 * (1 + sample)
            ends = {"certified": r, "first_order": 2 * r, "attacked": None if (k, sample) == (1, 0) else 10 * r}
            rows.append(row("change", k, n, value(k, n), sample=sample, change=0.1, size=10.0, **ends))
    return rows


def influence(n: int = 136, layer: int = 0, accuracy: float = 0.0) -> list[Row]:
    """Causal, and token j reaches the token d places behind it with `1/(1 + d)`."""
    norms = [[1 / (1 + i - j) if j <= i else 0.0 for j in range(n)] for i in range(n)]
    return [{"kind": "influence", "layer": layer, "n": n, "norms": norms, "accuracy": accuracy}]


def variants(count: int = 4) -> list[Row]:
    """Cosine has half of softmax's constant at its entropy, a quarter as published; linear four times, and no scale."""
    ways = (("softmax", "both", 1.0), ("cosine", "published", 0.25), ("cosine", "matched", 0.5), ("linear", "published", 4.0))
    about = {"sample": 0, "entropy": 2.5, "steps": 12}
    rows = []
    for layer in range(count):
        for name, way, times in ways:
            for n, factor in ((16, 1.0), (128, 1.0), (128, 0.5), (128, 2.0)):
                L = times * value(layer, n) * factor
                cost = {"softmax": 1.0, "cosine": 1.25, "linear": 0.5}[name] if factor == 1 else None
                more = {"upper": 1.1 * L, "relative": 2 * times, "matched": way != "published", "cost": cost}
                rows.append(row("variant", layer, n, L, variant=name, way=way, factor=factor, **about, **more))
    return rows


def report(rows: list[Row], **more) -> ReportData:
    return ReportData(rows, METHODS, **more)


def full(measured: list[Row] | None = None, *others: list[Row]) -> ReportData:
    """Every part of a report; others: in place of all rows but those of layers."""
    words = tuple(f"word{i}" for i in range(136))
    measured = with_shares(layers(), (128, 136)) if measured is None else measured
    rest = others or (
        yardsticks(),
        held(),
        maps(),
        heads(),
        bounds(),
        near(),
        changes(),
        splits(),
        worst(),
        influence(),
        variants(),
    )
    texts = {n: tokens(words[:n]) for n in (128, 136)}
    return report([*measured, *(r for rows in rest for r in rows)], texts=texts, notes=(NOTE,))


def harmful() -> ReportData:
    """Hostile text in every place where text can stand."""
    bad, n = HOSTILE[0] + HOSTILE[3], len(HOSTILE)
    methods = Methods(bad, bad, bad, bad, {bad: bad, "howsmooth": bad}, date=bad)
    parts = [bound("point", bad, bad, "upper", log, bad) | {"statement": bad, "source": bad} for log in (None, 5.0)]
    rows = [r | {"status": bad, "confidence": 0.5} for r in with_shares(layers(2, 1, (8, n)), (n,))]
    rows.append(row("bounds", 0, 8, 3.0, bounds=parts))
    rows.append(row("worst", 0, 8, 3.0, radius_max=1.0, text=2.0, log_ceiling=4.0, how=bad))
    rows += [r | {"word": bad + "**^2", "received": None} for r in held(2, n, sink=True)]
    rows += [r | {"map": bad} for r in maps(2, n)] + influence(n)
    rows += [r | {"variant": bad} if r["variant"] == "cosine" else r for r in variants(2)]
    return ReportData(rows, methods, {n: tokens(HOSTILE)}, (bad,), bad)


# of the demo's layers at 512 tokens: L at 8 tokens, in the mean and on the first sample, relative, ‖W_o W_v‖, gain, and the
# token that leads: where, what, its share, the attention it draws, and L with it frozen (`howsmooth demo`)
DEMO = (
    (3.7, 13.243, 11.441, 42.26, 2.754, 0.318, 391, "very", 0.424, 0.002, 10.818),
    (9.0, 20.019, 20.386, 44.97, 3.734, 0.637, 0, "[CLS]", 0.955, 0.084, 14.946),
    (9.6, 23.082, 24.985, 51.48, 4.570, 0.606, 0, "[CLS]", 0.930, 0.091, 19.446),
    (11.0, 27.904, 31.135, 54.34, 5.318, 0.576, 0, "[CLS]", 0.970, 0.148, 17.680),
    (9.8, 37.591, 34.795, 86.27, 4.224, 0.518, 0, "[CLS]", 0.982, 0.208, 13.752),
    (7.0, 13.708, 10.868, 41.39, 2.891, 0.293, 197, "late", 0.639, 0.012, 10.714),
)


def demo() -> ReportData:
    """The demo's numbers at its shortest and longest length, on eight samples."""
    rows = []
    for k, (short, L, first, relative, averaging, gain, token, word, share, received, frozen) in enumerate(DEMO):
        rest = {"confidence": 0.999999, "status": "converged", "radius": 10.0, "relative": relative}
        top = {"top_token": token, "top_word": word, "top_share": share, "top_received": received}
        for sample in range(8):
            at = first if sample == 0 else (L**8 / first) ** (1 / 7)  # so that the mean is the demo's
            rows.append(row("layer", k, 512, at, upper=1.01 * at, sample=sample, **rest, **top))
            rows.append(row("layer", k, 8, short, upper=1.01 * short, sample=sample, **rest))
        rows.append(row("yardstick", k, 512, first, averaging=averaging, gain=gain, logits=12.0))
        about = {"token": token, "word": word, "share": share, "received": received}
        rows.append(row("held", k, 512, frozen, whole=first, **about))
    return report(rows)
