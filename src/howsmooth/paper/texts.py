"""Windows of text through pretrained models, and through random ones of full size: `L` against n, layer by layer."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from howsmooth.errors import BadInputError
from howsmooth.models import FallbackWarning
from howsmooth.paper.curves import Curve, PointRow, curves_of, guides, length_ticks, log_axes, look, power, scripts_value
from howsmooth.paper.drawing import Drawn, new_figure
from howsmooth.paper.protocol import Experiment, Protocol
from howsmooth.paper.subjects import RANDOM, RANDOM_LAYERS, Masking, subject
from howsmooth.study import Job, Question, Steps, grouped, task


@task
def measure_text(reading: dict[str, Any], layers: list[int], n: int, sample: int) -> Iterator[PointRow]:
    """One window of text through a subject: for every layer `L`, what the scripts print, and `R`."""
    whole = subject(**{"device": "auto"} | reading)
    captured = whole.capture(n, sample, reading["seed"])
    study = "random" if whole.name in RANDOM else "real"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for m in captured.measure(layers, closed=False, seed=reading["seed"]):
            f = captured.map(m.layer)
            about = {"study": study, "model": whole.name, "masking": whole.masking, "sample": sample}
            yield PointRow.measured(m, about, scripts=scripts_value(f, f.start))


def real_jobs(protocol: Protocol) -> list[Job]:
    """Every pretrained model with each of its masks."""
    jobs = []
    for name, about in protocol.described():
        lengths = [n for n in (*protocol.lengths, *protocol.long) if about.shortest <= n <= about.longest]
        if len(lengths) < 2:
            raise BadInputError(
                f"expected a model that reads two of the lengths, got {name} with at most {about.longest}; leave it out"
            )
        jobs += _jobs(protocol, name, about.maskings, protocol.layers_of(about.layers), lengths)
    return jobs


def random_jobs(protocol: Protocol) -> list[Job]:
    """The random models with and without a mask."""
    jobs = []
    for name in RANDOM:
        least = 3 if name == "random:bert-base" else 2  # two tokens would be the special ones alone
        lengths = [n for n in protocol.random_lengths if n >= least]
        jobs += _jobs(protocol, name, ("unmasked", "masked"), list(RANDOM_LAYERS), lengths)
    return jobs


def _jobs(protocol: Protocol, name: str, maskings: Sequence[Masking], layers: list[int], lengths: Sequence[int]) -> list[Job]:
    return [
        Job(measure_text, {"reading": protocol.reading(name, masking, device=True), "layers": layers, "n": n, "sample": sample})
        for masking in maskings
        for n in lengths
        for sample in range(protocol.samples)
    ]


def growth_figure(title: str, lines: Sequence[Curve]) -> Drawn:
    """L against n, a panel for each subject and mask with a curve for each layer, and R below."""
    if not lines:
        return None
    groups = grouped(lines, lambda c: f"{c.short}, {c.masking}")
    shared: dict[str, Any] = {"squeeze": False, "sharex": "col", "sharey": "row", "height_ratios": [2.6, 1]}
    figure, axes = new_figure(2.9 * len(groups) + 0.2, 4.0, 2, len(groups), **shared)
    for column, (name, group) in enumerate(groups.items()):
        top, bottom = axes[0][column], axes[1][column]
        for i, c in enumerate(group):
            colour, marker = look(i)
            fit = c.long_fit or c.fit
            if fit is None or c.fit is None:
                continue
            top.fill_between(fit.lengths, fit.lows, fit.highs, color=colour, alpha=0.15, lw=0)
            top.plot(fit.lengths, fit.means, marker, color=colour, ms=2.2, label=f"layer {c.layer}: {power(c.fit)}")
            top.plot(c.fit.lengths, c.fit.fitted, "-", color=colour, lw=1.1)
            bottom.plot(c.lengths, [c.radius(n) for n in c.lengths], marker, color=colour, ms=1.8)
        guides(top, group)
        top.set_title(name, loc="left")
        top.legend(loc="best", handlelength=1.2)
        log_axes(top, "L" if not column else "")
        bottom.set(xscale="log", xlabel="tokens n", ylabel="R" if not column else "")
        bottom.set_ylim(0, 1.15 * max(c.radius(n) for c in lines for n in c.lengths))
        length_ticks(bottom, {n for c in group for n in c.lengths})
    figure.suptitle(f"{title}: lines and exponents are fitted up to n = 98", x=0.01, ha="left", fontsize=9)
    return figure


def real_tasks(protocol: Protocol) -> Steps:
    """Every window of text through every pretrained model."""
    yield real_jobs(protocol)


def random_tasks(protocol: Protocol) -> Steps:
    """Every window of text through every random model."""
    yield random_jobs(protocol)


REAL_TEXT = Experiment(
    Question(name="real", row=PointRow, tasks=real_tasks, title="Pretrained models on text"),
    "Windows of the text, tokens at the layer's input, R their size.",
    lambda rows: growth_figure("On text", curves_of(rows, "real")),
)
RANDOM_MODELS = Experiment(
    Question(name="random", row=PointRow, tasks=random_tasks, title="Random models of full size"),
    "BERT-base and GPT-2 as configured by transformers, width 768, 12 heads, fresh weights, dropout off.",
    lambda rows: growth_figure("Random weights", curves_of(rows, "random")),
)
