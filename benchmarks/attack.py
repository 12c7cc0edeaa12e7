"""Attacks on the demo model with Alice in Wonderland: guided attacks against plain ones at the same cost."""

from pathlib import Path
from typing import Any

import howsmooth as hs
from benchmarks.harness import WrongAnswerError
from howsmooth.paper import robustness
from howsmooth.study import attack_tokens

TITLE = "Guided attacks / plain ones with as many calls, demo model, windows of 24 tokens"
LENGTH = 24
BUDGETS = (1e-6, 0.03, 0.3)


def run(quick: bool) -> list[dict[str, Any]]:
    model = hs.load("demo", device="cpu")
    text = model.text((Path(hs.__file__).parent / "data" / "alice.txt").read_text("utf-8"))
    found = robustness(model, text.windows(LENGTH, 1 if quick else 3), budgets=BUDGETS, words=0)
    rows = []
    for budget in BUDGETS:
        for case in found.cases:
            small = [row for row in case.attacks if budget == BUDGETS[0] and row.epsilon == case.attacks[0].epsilon]
            shares = {row.method: row.share or 0.0 for row in small}
            if shares and (shares["singular"] < 0.98 or max(shares.values()) > 1.001):
                raise WrongAnswerError(f"layer {case.layer}: at first order attacks realise {shares}; something is wrong")
        wins, ratio = found.guided_wins[budget]
        rows.append(
            {
                "what": f"relinearised / projected gradient, budget {budget:g} of the input",
                "cases": len(found.cases),
                "wins": wins,
                "mean ratio": ratio,
                "beats mean": "",
                "rank correlation with L": found.correlations["relinearised"][budget],
            }
        )
    windows = text.windows(LENGTH, 4 if quick else 50, seed=1)
    for layer, way in ((3, "gradient"), (None, "gradient"), (3, "nearest embedding"), (3, "duplicate")):
        edits = [attack_tokens(model, w, layer=layer, ways=[way])[0] for w in windows]
        where = "the model" if layer is None else f"layer {layer}"
        rows.append(
            {
                "what": f"{way}, one word, output of {where} / best of as many random edits",
                "cases": len(edits),
                "wins": sum(e.wins for e in edits) / len(edits),
                "mean ratio": sum(e.score / e.random_best for e in edits) / len(edits),
                "beats mean": sum(e.score > e.random_mean for e in edits) / len(edits),
                "rank correlation with L": "",
            }
        )
    return rows
