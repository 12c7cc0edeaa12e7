"""What the public scripts compute: both numbers on the same inputs, the iteration step by step, and the module they read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from howsmooth.paper.curves import (
    L_COLOUR,
    SCRIPTS_COLOUR,
    PointRow,
    curves_of,
    length_ticks,
    log_axes,
    power,
    power_iteration,
    scripts_value,
)
from howsmooth.paper.drawing import Drawn, new_figure
from howsmooth.paper.protocol import Experiment, Protocol
from howsmooth.paper.subjects import LONGEST_WINDOW, length_of, subject
from howsmooth.paper.texts import random_jobs, real_jobs
from howsmooth.study import Job, Question, Row, Steps, task
from howsmooth.verbs import lipschitz

WHOLE_MODULE = "attention + residual + LayerNorm"


class _Whole(nn.Module):
    """`BertAttention` as a function of its tokens, (n, d)."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x[None])[0][0]


@task
def whole_module(reading: dict[str, Any], layers: list[int], n: int, sample: int) -> Iterator[PointRow]:
    """The module that the scripts read for BERT: attention, projection, residual and LayerNorm, without a mask."""
    whole, seed = subject(**reading), reading["seed"]
    captured = whole.capture(n, sample, seed)
    for layer in layers:
        x, f = captured.tokens(layer).float(), _Whole(whole.whole_modules[layer])
        place = {"study": "trap", "model": whole.name, "masking": whole.masking, "layer": layer, "map": WHOLE_MODULE, "n": n}
        scripts = power_iteration(f, x, element=0, steps=2, seed=seed)[-1]
        yield PointRow.solved(lipschitz(f, x, seed=seed), **place, sample=sample, scripts=scripts, radius=length_of(x))


@final
@dataclass(frozen=True, kw_only=True)
class StepRow(Row):
    """One step of the iteration from one random start, with either element of what `torch.func.jvp` returns.

    value: the constant.  scripts: what element 0 stands still at.
    """

    kind = "iteration"
    model: str = field()
    masking: str
    layer: int
    n: int
    start: int
    step: int
    element_0: float
    element_1: float
    value: float
    scripts: float


@task
def iteration(reading: dict[str, Any], layer: int, n: int, start: int, steps: int) -> Iterator[StepRow]:
    """The iteration step by step, from one random start."""
    whole = subject(**reading)
    attn, x = whole.attention(layer).to(torch.float64), whole.capture(n, 0, reading["seed"]).tokens(layer).double()
    about = {"model": whole.name, "masking": whole.masking, "layer": layer, "n": n, "start": start}
    about |= {"value": lipschitz(attn, x, tol=1e-8).value, "scripts": scripts_value(attn, x)}
    output, tangent = (power_iteration(attn, x, element=k, steps=steps, seed=start) for k in (0, 1))
    for k, (a, b) in enumerate(zip(output, tangent, strict=True), start=1):
        yield StepRow.of(about | {"step": k, "element_0": a, "element_1": b})


def trap_tasks(protocol: Protocol) -> Steps:
    """Every measurement on text carries both numbers; beside them, the module that the scripts read."""
    modules = [
        Job(whole_module, {"reading": protocol.reading(name, "unmasked"), "layers": layers, "n": n, "sample": sample})
        for name, about in protocol.described()
        if about.whole_module
        for layers in [protocol.layers_of(about.layers, few=True)]
        for n in protocol.module_lengths
        if about.shortest <= n <= about.longest
        for sample in range(min(protocol.samples, 3))
    ]
    yield real_jobs(replace(protocol, long=())) + random_jobs(protocol) + modules


def iteration_tasks(protocol: Protocol) -> Steps:
    """Three starts at one layer of a random model."""
    place = {"reading": protocol.reading("random:gpt2", "masked"), "layer": 6, "n": 32, "steps": 8}
    yield [Job(iteration, place | {"start": k}) for k in range(3)]


def trap_figure(rows: Sequence[Row]) -> Drawn:
    """The constant and what the scripts print, on the same inputs, a panel for each layer."""
    lines = [c for c in curves_of(rows, "real", "random", "trap") if c.fit is not None and c.scripts_fit is not None]
    if not lines:
        return None
    columns = min(4, len(lines))
    height = -(-len(lines) // columns)
    figure, grid = new_figure(2.35 * columns, 2.1 * height + 0.5, height, columns, squeeze=False)
    panels = list(grid.flat)
    for panel, c in zip(panels, lines, strict=False):
        for fit, colour, marker in ((c.fit, L_COLOUR, "o"), (c.scripts_fit, SCRIPTS_COLOUR, "s")):
            assert fit is not None
            panel.plot(fit.lengths, fit.means, marker, color=colour, ms=1.8, label=power(fit, sure=False))
            panel.plot(fit.lengths, fit.fitted, "-", color=colour, lw=0.9)
        log_axes(panel)
        length_ticks(panel, [n for n in c.lengths if n <= LONGEST_WINDOW])
        whole = "\nwith residual and norm" if c.study == "trap" else ""
        panel.set_title(f"{c.short}, {c.masking},\nlayer {c.layer}{whole}", loc="left", fontsize=7)
        panel.legend(fontsize=6, handlelength=1)
    for panel in panels[len(lines) :]:
        panel.axis("off")
    handles = [panels[0].plot([], [], s, color=k, ms=3)[0] for s, k in (("o-", L_COLOUR), ("s-", SCRIPTS_COLOUR))]
    names = ["L = ‖J‖₂", "what the public scripts print, √‖Jᵀ f(X)‖"]
    figure.legend(handles, names, loc="outside upper left", ncols=2, fontsize=8)
    figure.supxlabel("tokens n", fontsize=8)
    return figure


def iteration_figure(steps: Sequence[StepRow]) -> Drawn:
    """The power iteration step by step, from several starts, with either element of what `torch.func.jvp` returns."""
    figure, axes = new_figure(4.6, 2.7)
    for start in dict.fromkeys(r.start for r in steps):
        part = [r for r in steps if r.start == start]
        for values, colour, style, name in (
            ([r.element_0 for r in part], SCRIPTS_COLOUR, "s-", "jvp(…)[0], the output"),
            ([r.element_1 for r in part], L_COLOUR, "o-", "jvp(…)[1], the tangent"),
        ):
            label = name if start == steps[0].start else None
            axes.plot([r.step for r in part], values, style, color=colour, lw=0.9, label=label)
    r = steps[0]
    axes.axhline(r.scripts, color=SCRIPTS_COLOUR, ls=":", lw=1, label="√‖Jᵀ f(X)‖")
    axes.axhline(r.value, color=L_COLOUR, ls=":", lw=1, label="‖J‖₂")
    axes.set(xlabel="step of the power iteration", ylabel="printed", ylim=(0, None))
    axes.set_title(f"{r.model}, {r.masking}, layer {r.layer}, n = {r.n}", loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


TRAP = Experiment(
    Question(name="trap", row=PointRow, tasks=trap_tasks, title="What the public scripts compute"),
    "The scripts take the first element of what torch.func.jvp returns. That is the output f(X), not the tangent J u, so "
    "they print √‖Jᵀ f(X)‖ whatever the start. Both numbers on the same inputs:",
    trap_figure,
)
ITERATION = Experiment(
    Question(name="iteration", row=StepRow, tasks=iteration_tasks, title="The iteration step by step"),
    "With the output it stands still from the first step on; with the tangent it climbs to ‖J‖₂.",
    iteration_figure,
)
