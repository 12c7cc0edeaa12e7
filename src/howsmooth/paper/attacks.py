"""What a constant means for a real model: predicted sensitivity against what attacks got, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, final

from howsmooth.errors import BadInputError
from howsmooth.models import MapName, Model, Window
from howsmooth.paper.drawing import new_figure, save_figure
from howsmooth.progress import Progress, progress_bar
from howsmooth.report import COLOURS
from howsmooth.search import METHODS, Attacks, attack
from howsmooth.study import TokenAttack, attack_tokens

GUIDED, BASELINE = "relinearised", "projected gradient"


@final
@dataclass(frozen=True, eq=False)
class Case:
    """One layer at one window: the attacks on its features, and on the words."""

    window: int
    layer: int
    length: float
    attacks: Attacks
    words: tuple[TokenAttack, ...]

    @property
    def constant(self) -> float:
        return self.attacks.estimate.value

    def to_dict(self) -> dict[str, Any]:
        place = {"window": self.window, "layer": self.layer, "length": self.length}
        return place | self.attacks.to_dict() | {"words": [row.to_dict() for row in self.words]}


@final
@dataclass(frozen=True, eq=False)
class Robustness:
    """All cases.

    budgets: as shares of the length of the input.  correlations: for every method and budget, Spearman's between `L` and the
    gain, over cases.  guided_wins: for every budget the share of cases where the relinearised attack gains more than projected
    gradient with as many calls, and the mean of their ratio.  word_wins: for every way of changing words, the share of cases
    that beat random edits on average, and the best of as many.
    """

    model: str
    map: str
    budgets: tuple[float, ...]
    cases: tuple[Case, ...]

    def gains(self, method: str, budget: float) -> list[float]:
        """Gains of a method, case by case; zero where there is none."""
        index = self.budgets.index(budget)
        rows = [[row for row in case.attacks if row.method == method] for case in self.cases]
        return [(part[index].gain or 0.0) if part else 0.0 for part in rows]

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.method for case in self.cases for row in case.attacks))

    @property
    def correlations(self) -> dict[str, dict[float, float | None]]:
        constants = [case.constant for case in self.cases]
        return {m: {b: spearman(constants, self.gains(m, b)) for b in self.budgets} for m in self.methods}

    @property
    def guided_wins(self) -> dict[float, tuple[float, float]]:
        wins = {}
        for budget in self.budgets if {GUIDED, BASELINE} <= set(self.methods) else ():
            pairs = [(a, b) for a, b in zip(self.gains(GUIDED, budget), self.gains(BASELINE, budget), strict=True) if b > 0]
            if pairs:
                wins[budget] = (fmean(a > b for a, b in pairs), fmean(a / b for a, b in pairs))
        return wins

    @property
    def word_wins(self) -> dict[str, tuple[float, float]]:
        edits = [row for case in self.cases for row in case.words]
        wins = {}
        for way in dict.fromkeys(row.way for row in edits):
            rows = [row for row in edits if row.way == way]
            wins[way] = (fmean(r.score > r.random_mean for r in rows), fmean(r.wins for r in rows))
        return wins

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "map": self.map,
            "budgets": list(self.budgets),
            "correlations": {m: {str(b): r for b, r in row.items()} for m, row in self.correlations.items()},
            "guided_wins": {str(b): list(v) for b, v in self.guided_wins.items()},
            "word_wins": {way: list(v) for way, v in self.word_wins.items()},
            "cases": [case.to_dict() for case in self.cases],
        }


def robustness(
    model: Model,
    windows: Sequence[Window],
    *,
    layers: Sequence[int] | None = None,
    map: MapName = "attention",
    budgets: Sequence[float] = (1e-4, 0.03, 0.3),
    methods: Sequence[str] = METHODS,
    steps: int = 10,
    words: int = 1,
    ways: Sequence[str] = ("gradient",),
    scored: int = 32,
    forbid: Sequence[str] = (),
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Robustness:
    """Attack every layer of a model at every window, in its features and in its words.

    layers: all by default.  map: which map of a layer.  budgets: shares of the length of what enters the map.  words: how many
    may change, 0 for none.  ways, scored, forbid: as in `attack_tokens`.
    progress: a bar where a person watches; False for none.
    """
    if not windows:
        raise BadInputError("expected a window of text or more, got none; take them from model.text(...).windows(...)")
    if not budgets or any(not isinstance(b, int | float) or not 0 < b < 10 for b in budgets):
        raise BadInputError(f"expected budgets between 0 and 10 times the input's length, got {list(budgets)}; 0.03 is 3 %")
    if isinstance(words, bool) or not isinstance(words, int) or words < 0:
        raise BadInputError(f"expected a whole number of words, 0 for none, got {words!r}; correct it")
    cases: list[Case] = []
    with progress_bar("attacking", progress) as shown:
        for w, window in enumerate(windows):
            captured = model.capture(ids=window)
            chosen = range(captured.num_layers) if layers is None else layers
            if not cases:
                shown.begin(len(windows) * len(chosen))
            for layer in chosen:
                cut = captured.map(layer, map)
                x = cut.start
                length = float(x.double().norm())
                doubled = [i for i in window.ids for _ in "ab"]
                twice = model.capture(ids=doubled).map(layer, map) if "splitting" in methods else None
                attacks = attack(cut, x, [b * length for b in budgets], methods=methods, steps=steps, doubled=twice, seed=seed)
                edits: tuple[TokenAttack, ...] = ()
                if words and map in ("attention", "block"):
                    edits = attack_tokens(
                        model, window, layer=layer, map=map, words=words, ways=ways, scored=scored, forbid=forbid, seed=seed
                    )
                cases.append(Case(w, layer, length, attacks, edits))
                shown.advance()
    return Robustness(model.name, map, tuple(float(b) for b in budgets), tuple(cases))


def draw_robustness(path: Path, results: Robustness) -> Path:
    """For every budget, gains by layer (the mean over windows) beside the constant."""
    figure, (panels,) = new_figure(4.2 * len(results.budgets), 3.8, 1, len(results.budgets), squeeze=False)
    layers = sorted({case.layer for case in results.cases})

    def by_layer(values: list[float]) -> list[float]:
        pairs = list(zip((case.layer for case in results.cases), values, strict=True))
        return [fmean(v for at, v in pairs if at == i) for i in layers]

    constants = by_layer([case.constant for case in results.cases])
    for axes, budget in zip(panels, results.budgets, strict=True):
        axes.plot(layers, constants, "k--", lw=1.2, label="L")
        for k, method in enumerate(results.methods):
            axes.plot(layers, by_layer(results.gains(method, budget)), "o-", ms=3, lw=1.4, color=COLOURS[k], label=method)
        axes.set(xlabel="layer", ylabel="gain", title=f"budget {budget:g} of the input")
        axes.set_xticks(layers)
        axes.set_ylim(bottom=0)
    panels[0].legend(fontsize=7)
    return save_figure(figure, path)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The correlation of ranks, ties at their mean rank; None where one side is constant or there are fewer than three.

    >>> spearman([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 40.0, 30.0])
    0.8
    """
    import pandas

    if len(a) < 3 or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    return round(float(pandas.Series(a).rank().corr(pandas.Series(b).rank())), 12)
