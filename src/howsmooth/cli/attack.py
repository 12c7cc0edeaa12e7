"""`howsmooth attack`."""

from pathlib import Path

from howsmooth.cli import Answer, show_table
from howsmooth.models import MapName, load
from howsmooth.models.model import Side
from howsmooth.paper.attacks import Robustness, draw_robustness, robustness
from howsmooth.paper.drawing import check_figure
from howsmooth.study import read_text


def attack(
    model: str,
    *,
    text: str | None = None,
    n: int = 24,
    samples: int = 2,
    layers: tuple[int, ...] | None = None,
    map: MapName = "attention",
    side: Side | None = None,
    device: str = "auto",
    budgets: tuple[float, ...] = (1e-4, 0.03, 0.3),
    steps: int = 10,
    words: int = 1,
    scored: int = 32,
    forbid: str | None = None,
    seed: int = 0,
    figure: Path | None = None,
) -> Answer:
    """Search for changes of tokens and words that move a layer far.

    What an attack reaches stands beside the layer's local Lipschitz constant.

    n: number of tokens per window
    budgets: sizes of the perturbation, as fractions of the input's length
    steps: how often the map is linearised again
    words: how many words may change; 0 skips the attacks on words
    scored: candidate edits evaluated exactly per word
    forbid: a file of words that may not be used, one per line
    figure: also draw gains by layer (.png, .pdf or .svg)

    Example: howsmooth attack demo --layers 3 --samples 1 --figure attack.png
    """
    if figure is not None:
        check_figure(figure)
    passage, banned = read_text(text), [] if forbid is None else read_text(forbid).split()
    loaded = load(model, device, side=side)
    results = robustness(
        loaded,
        loaded.text(passage).windows(n, samples, seed),
        layers=layers,
        map=map,
        budgets=budgets,
        steps=steps,
        words=words,
        scored=scored,
        forbid=banned,
        seed=seed,
    )
    return Answer(results.to_dict(), lambda: _show(results), figure and (lambda: draw_robustness(figure, results)))


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
        show_table(f"gain of {moved}, its share of L, and its rank correlation with L", lines, keys=3)
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
