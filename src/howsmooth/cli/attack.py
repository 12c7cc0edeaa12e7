"""`howsmooth attack`."""

from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli import options
from howsmooth.cli.root import Told, command, show_table
from howsmooth.models import load
from howsmooth.paper.attacks import Robustness, draw_robustness, robustness
from howsmooth.paper.drawing import check_figure
from howsmooth.study import read_text


@command()
def attack(
    model: options.ModelName,
    text: options.Text = None,
    n: Annotated[int, typer.Option(help="tokens in a window")] = 24,
    samples: options.Samples = 2,
    layers: options.Layers = "all",
    map_name: options.Map = "attention",
    side: options.Side = None,
    device: options.Device = "auto",
    budgets: Annotated[str, typer.Option(help="lengths of the change, as shares of the input's length")] = "1e-4,0.03,0.3",
    steps: Annotated[int, typer.Option(help="re-linearisations")] = 10,
    words: Annotated[int, typer.Option(help="words that may change; 0 for none")] = 1,
    scored: Annotated[int, typer.Option(help="edits scored exactly, for each word")] = 32,
    forbid: Annotated[str | None, typer.Option(help="a file of words that may not be used, one a line")] = None,
    seed: options.Seed = 0,
    figure: Annotated[Path | None, typer.Option(help="also draw gains by layer (.png, .pdf or .svg)")] = None,
) -> Told:
    """Attack a model's layers and words, and set what was reached beside the Lipschitz constants.

    Example: howsmooth attack demo --samples 2 --figure attack.png
    """
    if figure is not None:
        check_figure(figure)
    chosen, where = options.layers_of(layers), options.map_of(map_name)
    shares = options.numbers_of(budgets, "--budgets", "1e-4,0.03")
    passage, banned = read_text(text), [] if forbid is None else read_text(forbid).split()
    loaded = load(model, device, side=side)
    results = robustness(
        loaded,
        loaded.text(passage).windows(n, samples, seed),
        layers=chosen,
        map=where,
        budgets=shares,
        steps=steps,
        words=words,
        scored=scored,
        forbid=banned,
        seed=seed,
        progress=lambda done, of: typer.echo(f"\rcase {done} of {of}", err=True, nl=done == of),
    )
    return Told(results.to_dict(), lambda: _show(results), figure and (lambda: draw_robustness(figure, results)))


def _show(results: Robustness) -> None:
    for budget in results.budgets:
        gains = {m: results.gains(m, budget) for m in results.methods}
        lines = [
            {"window": case.window, "layer": case.layer, "L": case.constant}
            | {m: f"{gains[m][i]:.4g} {gains[m][i] / case.constant:>6.1%}" for m in gains}
            for i, case in enumerate(results.cases)
        ]
        ranks = {m: results.correlations[m][budget] for m in gains}
        lines.append({"L": "rank"} | {m: "–" if rank is None else f"{rank:.2f}" for m, rank in ranks.items()})
        moved = f"attacks that move the input of the {results.map} map by {budget:g} of its length"
        show_table(f"gain of {moved}, its share of L, and its rank correlation with L", lines)
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
