"""`howsmooth attack`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli.root import Debug, Json, app, one_sentence
from howsmooth.errors import BadInputError
from howsmooth.models import load
from howsmooth.paper.robustness import Robustness, robustness


@app.command()
def attack(
    model: Annotated[str, typer.Argument(help="demo, a folder, or a hub name")],
    text: Annotated[Path | None, typer.Option(help="a text file; Alice in Wonderland by default")] = None,
    n: Annotated[int, typer.Option(help="tokens in a window")] = 24,
    samples: Annotated[int, typer.Option(help="windows of the text")] = 2,
    layers: Annotated[str, typer.Option(help="all, or layers as in 0,3,5")] = "all",
    map: Annotated[str, typer.Option(help="attention, heads, normed, block or model")] = "attention",
    budgets: Annotated[str, typer.Option(help="lengths of the change, as shares of the input's length")] = "1e-4,0.03,0.3",
    steps: Annotated[int, typer.Option(help="re-linearisations")] = 10,
    words: Annotated[int, typer.Option(help="words that may change; 0 for none")] = 1,
    scored: Annotated[int, typer.Option(help="edits scored exactly, for each word")] = 32,
    forbid: Annotated[Path | None, typer.Option(help="a file of words that may not be used, one a line")] = None,
    seed: Annotated[int, typer.Option(help="of the windows and of random attacks")] = 0,
    figure: Annotated[Path | None, typer.Option(help="also draw gains by layer (.png, .pdf or .svg)")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Attack a model's layers and words, and set what was reached beside the Lipschitz constants.

    Example: howsmooth attack demo --samples 2 --figure attack.png
    """
    with one_sentence(debug):
        if figure is not None:
            from howsmooth.paper.worst_figures import check_figure

            check_figure(figure)
        shares, banned = _shares(budgets), _words(forbid)
        loaded = load(model)
        windows = loaded.text(_text(text)).windows(n, samples, seed)
        found = robustness(
            loaded,
            windows,
            layers=_layers(layers),
            map=map,  # type: ignore[arg-type]
            budgets=shares,
            steps=steps,
            words=words,
            scored=scored,
            forbid=banned,
            seed=seed,
            progress=lambda done, of: typer.echo(f"\rcase {done} of {of}", err=True, nl=done == of),
        )
        if as_json:
            print(json.dumps(found.to_dict(), indent=1))
        else:
            _show(found)
        if figure is not None:
            from howsmooth.paper.worst_figures import draw_robustness

            path = draw_robustness(figure, found)
            if not as_json:
                print(path)


def _show(found: Robustness) -> None:
    for budget in found.budgets:
        print(f"gain of attacks that move the input of the {found.map} map by {budget:g} of its length")
        print(f"{'window':>7}{'layer':>6}{'L':>9}" + "".join(f"{m:>20}" for m in found.methods))
        columns = {m: found.gains(m, budget) for m in found.methods}
        for i, case in enumerate(found.cases):
            cells = "".join(f"{columns[m][i]:>11.4g}{columns[m][i] / case.constant:>9.1%}" for m in found.methods)
            print(f"{case.window:>7}{case.layer:>6}{case.constant:>9.4g}{cells}")
        ranks = {m: found.correlations[m][budget] for m in found.methods}
        cells = "".join("–".rjust(20) if r is None else f"{r:>20.2f}" for r in ranks.values())
        print(f"{'rank correlation of gain with L':>22}{cells[9:]}")
        if budget in found.guided_wins:
            share, ratio = found.guided_wins[budget]
            print(
                f"relinearised beats projected gradient in {share:.0%} of cases; it gains {ratio:.3f} times as much on average"
            )
    for case in found.cases:
        for row in case.words:
            edits = ", ".join(str(c) for c in row.changes) or row.note
            beside = f"random {row.random_mean:.3f}, best of {row.scored} {row.random_best:.3f}"
            print(f"window {case.window} layer {case.layer} {row.way}: {edits} moves the output by {row.score:.3f} ({beside})")
    for way, (mean, best) in found.word_wins.items():
        print(f"{way}: beats random edits on average in {mean:.0%} of cases, the best of as many in {best:.0%}")


def _text(path: Path | None) -> str:
    if path is None:
        path = Path(__file__).parents[1] / "data" / "alice.txt"
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"expected a text file in UTF-8, got {path} ({error}); check the path") from None


def _words(path: Path | None) -> list[str]:
    return [] if path is None else [line.strip() for line in _text(path).splitlines() if line.strip()]


def _layers(text: str) -> list[int] | None:
    if text == "all":
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BadInputError(f"expected all or layers like 0,3,5, got {text!r}; give whole numbers with commas") from None


def _shares(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise BadInputError(f"expected budgets like 1e-4,0.03, got {text!r}; give numbers with commas") from None
