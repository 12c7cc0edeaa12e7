"""`howsmooth measure`."""

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from howsmooth.cli.root import Debug, Json, app, one_sentence
from howsmooth.errors import BadInputError
from howsmooth.models.cut import MAPS, MapName
from howsmooth.models.loading import load
from howsmooth.models.measurement import Measurement


@app.command()
def measure(
    model: Annotated[str, typer.Argument(help="demo, a folder with config.json and safetensors, or a hub name")],
    layer: Annotated[int, typer.Option(help="which attention layer, from 0")],
    text: Annotated[str | None, typer.Option(help="a text file, or - for standard input")] = None,
    ids: Annotated[
        str | None, typer.Option(help="a JSON list of token ids, fed as they are; a file, or - for standard input")
    ] = None,
    map_name: Annotated[str, typer.Option("--map", help=f"one of {', '.join(MAPS)}")] = "attention",
    n: Annotated[int | None, typer.Option(help="tokens to take from the text, special ones among them; all by default")] = None,
    head: Annotated[int | None, typer.Option(help="one head alone")] = None,
    heads: Annotated[bool, typer.Option("--heads", help="also each head by itself")] = False,
    side: Annotated[str | None, typer.Option(help="encoder or decoder, text or vision, of a model with two")] = None,
    tol: Annotated[float, typer.Option(help="relative accuracy of the value")] = 1e-3,
    certify: Annotated[float | None, typer.Option(help="go on until upper/lower is at most 1 + this")] = None,
    seed: Annotated[int, typer.Option(help="of the random start")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure how smooth one layer of a model is at one input, and which words carry the worst direction.

    Example: howsmooth measure demo --layer 3 --text alice.txt --n 128
    """
    with one_sentence(debug), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = _given(text, ids)
        found = load(model, side=side).measure(
            **given, n=n, layer=layer, map=_map(map_name), head=head, heads=heads, tol=tol, certify=certify, seed=seed
        )
    for remark in {str(w.message) for w in caught if issubclass(w.category, UserWarning)}:
        typer.echo(f"howsmooth: {remark}", err=True)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    elif sys.stdout.isatty():
        _show(found)
    else:
        print("\n".join(_lines(found)))


def _map(name: str) -> MapName:
    for known in MAPS:
        if name == known:
            return known
    raise BadInputError(f"expected --map to be one of {', '.join(MAPS)}, got {name!r}; pick one of them")


def _given(text: str | None, ids: str | None) -> dict[str, Any]:
    """The input as `measure` takes it."""
    if (text is None) == (ids is None):
        raise BadInputError("expected either --text or --ids, got both or neither; give one of them")
    if text is not None:
        return {"text": _read(text)}
    assert ids is not None
    try:
        found = json.loads(_read(ids))
    except ValueError as error:
        raise BadInputError(f"expected a JSON list of token ids, got {ids} ({error}); write it as [101, 2023, 102]") from None
    if not isinstance(found, list):
        raise BadInputError(f"expected a JSON list of token ids, got {type(found).__name__}; write it as [101, 2023, 102]")
    return {"ids": found}


def _read(where: str) -> str:
    if where == "-":
        return sys.stdin.read()
    try:
        return Path(where).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"expected a text file, got {where} ({error}); check the path") from None


def _rows(found: Measurement) -> list[tuple[str, str]]:
    estimate = found.estimate
    sure = "certainly" if estimate.confidence == 1 else f"with probability {estimate.confidence:.6g}"
    head = "" if found.head is None else f", head {found.head}"
    rows = [
        ("map", f"{found.map} of layer {found.layer}{head} ({found.module})"),
        ("tokens", str(found.n)),
        ("L", f"{estimate.value:.6g}"),
        ("interval", f"[{estimate.lower:.6g}, {estimate.upper:.6g}] {sure} ({estimate.status}, {estimate.steps} steps)"),
        ("radius", f"{found.radius_rms:.4g} root mean square, {found.radius_max:.4g} at most"),
    ]
    if found.logits is not None:
        rows.append(("logits", f"{found.logits[0]:.4g} to {found.logits[1]:.4g}"))
    rows += [
        ("spread", f"{found.effective_inputs:.1f} tokens in, {found.effective_outputs:.1f} tokens out"),
        ("remark", found.remark),
        *(("note", note) for note in found.notes),
    ]
    return rows


def _lines(found: Measurement) -> list[str]:
    lines = [found.model, *(f"  {name:<9} {value}" for name, value in _rows(found))]
    lines += ["", "  share of the worst direction, and of what it becomes", f"  {'token':>6} {'in':>6} {'out':>6}  word"]
    lines += [f"  {i:>6} {share:>6.1%} {found.output_share[i]:>6.1%}  {word}" for i, word, share in _top(found)]
    if found.heads:
        lines += ["", f"  {'head':>6} {'L':>9}"]
        lines += [f"  {h:>6} {e.value:>9.4g}" for h, e in enumerate(found.heads)]
    return lines


def _top(found: Measurement) -> list[tuple[int, str, float]]:
    """The five tokens that carry most, and the one that is hit hardest."""
    top = found.top_tokens()
    if found.output_share:
        hit = max(range(found.n), key=lambda i: found.output_share[i])
        if hit not in [i for i, _, _ in top]:
            top.append((hit, found.tokens[hit], found.input_share[hit]))
    return top


def _show(found: Measurement) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(title=found.model, show_header=False, box=None, title_justify="left", title_style="bold")
    for name, value in _rows(found):
        table.add_row(Text(name, style="cyan"), Text(value, style="bold" if name == "L" else ""))
    console.print(table)
    words = Table(title="share of the worst direction, and of what it becomes", title_justify="left")
    for column, justify in (("token", "right"), ("word", "left"), ("in", "right"), ("out", "right"), ("", "left")):
        words.add_column(column, justify=justify)  # pyright: ignore[reportArgumentType]
    for i, word, share in _top(found):
        bar = "█" * max(1, round(30 * share))
        words.add_row(str(i), Text(word), f"{share:.1%}", f"{found.output_share[i]:.1%}", Text(bar, style="red"))
    console.print(words)
    if found.heads:
        table = Table("head", "L", title="each head by itself", title_justify="left")
        for h, e in enumerate(found.heads):
            table.add_row(str(h), f"{e.value:.4g}")
        console.print(table)
