"""`howsmooth measure`."""

import json
import warnings
from typing import Any

from howsmooth.cli import Answer, note, show_table
from howsmooth.cli.options import positions_of, read_stdin
from howsmooth.errors import BadInputError
from howsmooth.models import MapName, Measurement, Measurements, load
from howsmooth.models.model import Side
from howsmooth.study import read_text

_USUAL = 128  # tokens of Alice


def measure(
    model: str,
    *,
    layer: tuple[int, ...] | None = None,
    text: str | None = None,
    ids: str | None = None,
    map: MapName = "attention",
    n: int | None = None,
    head: int | None = None,
    heads: bool = False,
    tokens: str | None = None,
    side: Side | None = None,
    device: str = "auto",
    tol: float = 1e-3,
    certify: float | None = None,
    seed: int | None = None,
) -> Answer:
    """Measure how much each layer amplifies a small change.

    The answer is the local Lipschitz constant L of every layer at one input, with an upper bound. For one layer the words that
    carry the worst direction are shown too.

    layer (--layer, --layers): layers as in 3 or 0,3,5, counted from 0 [default: all]
    text: a text file, or - for standard input [default: Alice in Wonderland]
    ids: instead of a text, a JSON list of token ids: a file, or - for standard input
    n: number of tokens to take from the text, special ones among them [default: 128 of Alice, all of another text]
    head: measure one head alone
    heads: also measure each head by itself
    tokens: positions that may move, as in 0,5-9, while the others are frozen [default: all]
    seed: random seed for the solver's start [default: made from the input]

    Example: howsmooth measure demo
    Example: howsmooth measure demo --layer 3 --n 32 --heads
    """
    free, given = positions_of(tokens), _given(text, ids)
    if not given:
        given, n = {"text": read_text(None)}, _USUAL if n is None else n
    which = layer[0] if layer is not None and len(layer) == 1 else layer
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = load(model, device, side=side).measure(
            **given, n=n, layer=which, map=map, head=head, heads=heads, tokens=free, tol=tol, certify=certify, seed=seed
        )
    for remark in {str(w.message) for w in caught if issubclass(w.category, UserWarning)}:
        note(remark)
    return Answer(found.to_dict(), lambda: _show(found) if isinstance(found, Measurement) else _show_all(found))


def _given(text: str | None, ids: str | None) -> dict[str, Any]:
    """The input as `measure` takes it, nothing where none is named."""
    if text is not None and ids is not None:
        raise BadInputError("expected either --text or --ids, got both; give one of them")
    source = ids if text is None else text
    if source is None:
        return {}
    words = read_stdin() if source == "-" else read_text(source)
    if text is not None:
        return {"text": words}
    try:
        numbers = json.loads(words)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"expected a JSON list of token ids, got {ids} ({error}); write it as [101, 2023, 102]") from None
    if not isinstance(numbers, list):
        raise BadInputError(f"expected a JSON list of token ids, got {type(numbers).__name__}; write it as [101, 2023, 102]")
    return {"ids": numbers}


def _show_all(found: Measurements) -> None:
    rows = [
        {"layer": m.layer, "L": m.value, "at most": m.upper, "relative": m.relative, "status": m.status, "carried by": m.remark}
        for m in found
    ]
    show_table(f"{found[0].model}, {found[0].map}, n = {found[0].n}", rows, words=("status", "carried by"))


def _show(m: Measurement) -> None:
    estimate, head = m.estimate, "" if m.head is None else f", head {m.head}"
    sure = "certainly" if estimate.confidence == 1 else f"with probability {estimate.confidence:.6g}"
    facts = [
        ("map", f"{m.map} of layer {m.layer}{head} ({m.module})"),
        ("tokens", str(m.n) if m.moving is None else f"{m.n}, of which {len(m.moving)} may move"),
        ("L", f"{estimate.value:.6g}"),
        ("interval", f"[{estimate.lower:.6g}, {estimate.upper:.6g}] {sure} ({estimate.status}, {estimate.steps} steps)"),
        ("radius", f"{m.radius_rms:.4g} root mean square, {m.radius_max:.4g} at most"),
        ("logits", "" if m.logits is None else f"{m.logits[0]:.4g} to {m.logits[1]:.4g}"),
        ("spread", f"{m.effective_inputs:.1f} tokens in, {m.effective_outputs:.1f} tokens out"),
        ("remark", m.remark),
        *(("note", note) for note in m.notes),
    ]
    print(m.model, *(f"  {name:<9} {value}" for name, value in facts if value), "", sep="\n")
    places = [i for i, _, _ in m.top_tokens()]
    hit = max(range(m.n), key=lambda i: m.output_share[i])  # the token that is hit hardest is shown too
    tokens = [
        {
            "token": i,
            "in": f"{m.input_share[i]:.1%}",
            "out": f"{m.output_share[i]:.1%}",
            "word": m.tokens[i],
            "": "█" * max(1, round(30 * m.input_share[i])),
        }
        for i in dict.fromkeys([*places, hit])
    ]
    show_table("share of the worst direction, and of what it becomes", tokens, words=("word", ""))
    if m.heads:
        print()
        show_table("each head by itself", [{"head": h, "L": e.value} for h, e in enumerate(m.heads)])
