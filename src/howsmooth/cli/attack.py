"""`howsmooth attack`."""

from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli.root import Debug, Json, app, one_sentence
from howsmooth.cli.shared import Layers, MapOption, TextFile, layers_of, numbers_of, print_json
from howsmooth.models import load
from howsmooth.paper import Robustness, check_figure, draw_robustness, robustness
from howsmooth.study import read_text


@app.command()
def attack(
    model: Annotated[str, typer.Argument(help="demo, a folder, or a hub name")],
    text: TextFile = None,
    n: Annotated[int, typer.Option(help="tokens in a window")] = 24,
    samples: Annotated[int, typer.Option(help="windows of the text")] = 2,
    layers: Layers = "all",
    map: MapOption = "attention",
    budgets: Annotated[str, typer.Option(help="lengths of the change, as shares of the input's length")] = "1e-4,0.03,0.3",
    steps: Annotated[int, typer.Option(help="re-linearisations")] = 10,
    words: Annotated[int, typer.Option(help="words that may change; 0 for none")] = 1,
    scored: Annotated[int, typer.Option(help="edits scored exactly, for each word")] = 32,
    forbid: Annotated[str | None, typer.Option(help="a file of words that may not be used, one a line")] = None,
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
            check_figure(figure)
        chosen, shares = layers_of(layers), numbers_of(budgets, "--budgets", "1e-4,0.03")
        passage, banned = read_text(text), [] if forbid is None else read_text(forbid).split()
        loaded = load(model)
        results = robustness(
            loaded,
            loaded.text(passage).windows(n, samples, seed),
            layers=chosen,
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
            print_json(results.to_dict())
        else:
            _show(results)
        if figure is not None:
            path = draw_robustness(figure, results)
            if not as_json:
                print(path)


def _show(results: Robustness) -> None:
    for budget in results.budgets:
        print(f"gain of attacks that move the input of the {results.map} map by {budget:g} of its length")
        print(f"{'window':>7}{'layer':>6}{'L':>9}" + "".join(f"{m:>20}" for m in results.methods))
        columns = {m: results.gains(m, budget) for m in results.methods}
        for i, case in enumerate(results.cases):
            cells = "".join(f"{columns[m][i]:>11.4g}{columns[m][i] / case.constant:>9.1%}" for m in results.methods)
            print(f"{case.window:>7}{case.layer:>6}{case.constant:>9.4g}{cells}")
        ranks = {m: results.correlations[m][budget] for m in results.methods}
        cells = "".join("–".rjust(20) if r is None else f"{r:>20.2f}" for r in ranks.values())
        print(f"{'rank correlation of gain with L':>22}{cells[9:]}")
        if budget in results.guided_wins:
            share, ratio = results.guided_wins[budget]
            print(
                f"relinearised beats projected gradient in {share:.0%} of cases; it gains {ratio:.3f} times as much on average"
            )
    for case in results.cases:
        for row in case.words:
            edits = ", ".join(str(c) for c in row.changes) or row.note
            beside = f"random {row.random_mean:.3f}, best of {row.scored} {row.random_best:.3f}"
            print(f"window {case.window} layer {case.layer} {row.way}: {edits} moves the output by {row.score:.3f} ({beside})")
    for way, (mean, best) in results.word_wins.items():
        print(f"{way}: beats random edits on average in {mean:.0%} of cases, the best of as many in {best:.0%}")
