"""The paper's experiments in one sweep, and what is written of them: figures, tables, and a page without script or request."""

import base64
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib import resources
from pathlib import Path, PurePath
from string import Template
from typing import Any, Literal, final, get_args

from howsmooth.models import measuring_device
from howsmooth.paper.adversarial import ADVERSARIAL
from howsmooth.paper.curves import L_COLOUR, SCRIPTS_COLOUR, Exponents, curves_of, exponents
from howsmooth.paper.drawing import Drawn, make_folder, new_figure, save_both, save_rows
from howsmooth.paper.meanfield import CONVERGENCE, RADIUS
from howsmooth.paper.protocol import Experiment, Protocol
from howsmooth.paper.scripts import ITERATION, TRAP
from howsmooth.paper.splitting_maps import FREQUENCY, MAP
from howsmooth.paper.subjects import short_names
from howsmooth.paper.texts import RANDOM_MODELS, REAL_TEXT
from howsmooth.progress import Progress
from howsmooth.report import figure_style, whole_page
from howsmooth.results import html_table
from howsmooth.run import Engine, Plan, check_folder, claim_folder, read, sweep, writing
from howsmooth.study import Row, row_of

Part = Literal["real", "random", "adversarial", "meanfield", "splitting", "trap"]
PARTS: tuple[Part, ...] = get_args(Part)
EXPERIMENTS: dict[Part, tuple[Experiment, ...]] = {
    "real": (REAL_TEXT,),
    "random": (RANDOM_MODELS,),
    "adversarial": (ADVERSARIAL,),
    "trap": (TRAP, ITERATION),
    "meanfield": (RADIUS, CONVERGENCE),
    "splitting": (MAP, FREQUENCY),
}
_STYLE = """
.chart { overflow-x: auto; }
.chart img { width: 100%; height: auto; display: block; background: #fff; }
"""


def plan(part: Part, protocol: Protocol) -> Plan:
    """The tasks of one part; each pretrained model is looked at once to know its layers."""
    jobs = [job for experiment in EXPERIMENTS[part] for some in experiment.question.tasks(protocol) for job in some]
    return functools.reduce(Plan.__add__, (Plan.of(job.function, [job.arguments]) for job in jobs))


@final
@dataclass(frozen=True)
class Reproduced:
    """What was measured, with what a reader needs to make it again.

    rows: of every task of the plan that is done.  failures: reasons, and how many tasks.
    """

    path: Path
    rows: tuple[Row, ...]
    tasks: int
    skipped: int
    failures: Mapping[str, int]
    versions: Mapping[str, str]
    protocol: Protocol
    command: str


def reproduce(
    parts: Sequence[Part],
    folder: Path,
    protocol: Protocol,
    *,
    resume: bool = False,
    force: bool = False,
    engine: Engine | None = None,
    progress: Progress | bool | None = None,
    command: str = "",
) -> Reproduced:
    """Measure what the parts need and the folder does not have yet; each result is kept as it arrives.

    resume: continue what is in the folder.  force: begin again, or write into a folder that holds other files.
    """
    check_folder(folder, "reproduction", resume=resume, force=force)
    measuring_device(protocol.device)
    # plans first: an unknown model is refused before anything is written
    plans = functools.reduce(Plan.__add__, (plan(part, protocol) for part in parts))
    path = claim_folder(folder, "reproduction", resume=resume, force=force)
    ended = sweep(plans, path, engine=engine, resume=resume, progress=progress, command=command or None)
    keys = {task.key for task in plans.tasks}
    kept = [record for record in read(path) if record.key in keys]
    done = [record for record in kept if record.status == "done"]
    return Reproduced(
        path,
        rows=tuple(row for record in done for cells in record.value if (row := row_of(cells)) is not None),
        tasks=len(plans.tasks),
        skipped=ended.skipped,
        failures=Counter(str(record.reason) for record in kept if record.status == "failed"),
        versions=done[-1].versions if done else {},
        protocol=protocol,
        command=command,
    )


def write_reproduction(result: Reproduced, folder: Path) -> list[Path]:
    """`index.html`, figures as PDF and PNG, `curves.csv` and `exponents.csv`."""
    lines = exponents(result.rows)
    shown = [(e.question.name, e.question.title, e.text, e.drawn) for some in EXPERIMENTS.values() for e in some]
    sections, contents, figures = "", "", []
    make_folder(folder)
    for name, title, text, draw in [("exponents", *_SIDE_BY_SIDE, lambda _: exponent_chart(lines)), *shown]:
        with figure_style():
            figure = draw(result.rows)
            if figure is None:
                continue
            figures += save_both(figure, folder / name)
        image = base64.b64encode((folder / name).with_suffix(".png").read_bytes()).decode()
        chart = f'<figure class="chart"><img alt="{escape(title)}" src="data:image/png;base64,{image}"></figure>'
        sections += f'<section id="{name}"><h2>{escape(title)}</h2><p>{escape(text)}</p>{chart}</section>'
        contents += f'<a href="#{name}">{escape(title)}</a>'
    if lines:
        table = html_table("Exponents up to n = 98", [_shown(e) for e in lines])
        sections += f'<section id="numbers"><h2>Exponents</h2><div class="scroll">{table}</div></section>'
        contents += '<a href="#numbers">Numbers</a>'
    page = folder / "index.html"
    with writing(page) as part:
        part.write_text(_page(sections, contents, lines, result), "utf-8")
    means = [row for c in curves_of(result.rows) for row in c.table()]
    tables = {"curves.csv": means, "exponents.csv": [asdict(e) for e in lines]}
    return [page, *figures, *(save_rows(rows, folder / name) for name, rows in tables.items() if rows)]


def _page(sections: str, contents: str, lines: Sequence[Exponents], result: Reproduced) -> str:
    """The page as text. Everything that comes from outside is escaped."""
    protocol = result.protocol
    methods = {
        "models": ", ".join(protocol.models),
        "text": "Alice in Wonderland" if protocol.text is None else PurePath(protocol.text).name,
        "samples a length": str(protocol.samples),
        "seed": str(protocol.seed),
        "tasks": str(result.tasks),
        "software": ", ".join(f"{k} {v}" for k, v in result.versions.items()),
        "files": "results.sqlite and results.csv: all measurements, curves.csv: what is drawn, exponents.csv: what is fitted",
    }
    listed = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in methods.items() if v)
    failures = "".join(
        f'<div class="finding">{count} tasks failed: {escape(why)}</div>' for why, count in result.failures.items()
    )
    template = resources.files("howsmooth").joinpath("paper/reproduction.html").read_text("utf-8")
    sentences = answer(lines)
    return whole_page(
        Template(template).substitute(sections=sections, methods=listed, command=escape(result.command)),
        title="How smooth is attention? The experiments of Castin, Ablin & Peyré (ICML 2024), measured again",
        name="How smooth is attention? The experiments again",
        description=sentences[0],
        answer=[escape(sentence) for sentence in sentences],
        below=f"{failures}\n<nav>{contents}</nav>",
        version=result.versions.get("howsmooth", ""),
        style=_STYLE,
    )


def answer(lines: Sequence[Exponents]) -> list[str]:
    """What the exponents say, in a sentence for each experiment that was made."""
    sentences = []
    names = {"real": "On text", "random": "With random weights", "adversarial": "At the paper's adversarial tokens"}
    for study, start in names.items():
        part = [e for e in lines if e.study == study and e.map != "worst configuration"]
        if part:
            constants, scripts = [e.exponent for e in part], [e.scripts for e in part]
            sentences.append(
                f"{start} L grows like n to the power {min(constants):.2f} to {max(constants):.2f} over {len(part)} curves; "
                f"what the public scripts print there, {min(scripts):.2f} to {max(scripts):.2f}."
            )
    return sentences or ["Mean-field constants and mass splitting."]


def _shown(e: Exponents) -> dict[str, Any]:
    """A line of the page's table."""
    cells = {name.replace("_", " "): value for name, value in asdict(e).items()}
    return {name: f"{v:.3f}" if isinstance(v, float) else "" if v is None else v for name, v in cells.items()}


_SIDE_BY_SIDE = (
    "Exponents side by side",
    "L grows like n to this power up to n = 98. A circle is the constant, a square what the paper's public scripts print "
    "on the same inputs, a bar what is drawn on the paper's plot. Lines are 95 % intervals.",
)


def exponent_chart(lines: Sequence[Exponents]) -> Drawn:
    """Exponents of every curve: of L, of what the scripts print, and the paper's where it drew one."""
    if not lines:
        return None
    figure, axes = new_figure(6.2, 0.9 + 0.19 * len(lines))
    for i, e in enumerate(lines):
        for value, low, high, colour, marker, shift in (
            (e.exponent, e.low, e.high, L_COLOUR, "o", -0.12),
            (e.scripts, e.scripts_low, e.scripts_high, SCRIPTS_COLOUR, "s", 0.12),
        ):
            if low is not None and high is not None:
                axes.plot([low, high], [i + shift] * 2, "-", color=colour, lw=1)
            axes.plot(value, i + shift, marker, color=colour, ms=3.2)
        if e.printed is not None:
            axes.plot(e.printed, i, "|", color="black", ms=9, mew=1.4)
    for guide in (0, 0.25, 0.5):
        axes.axvline(guide, color="0.8", lw=0.7, zorder=0)
    axes.set(ylim=(len(lines) - 0.5, -0.5), xlabel="exponent up to n = 98")
    what = {"attention": "", "eigenvector tokens": ", eigenvector tokens", "worst configuration": ", worst configuration"}
    short = short_names(e.subject for e in lines)
    names = [f"{short[e.subject]}, {e.masking}, layer {e.layer}{what.get(e.map, ', with residual and norm')}" for e in lines]
    axes.set_yticks(range(len(lines)), names, fontsize=6.5)
    styles = (("o", L_COLOUR, "L"), ("s", SCRIPTS_COLOUR, "the scripts' number"), ("|", "black", "printed in the paper"))
    for marker, colour, name in styles:
        axes.plot([], [], marker, color=colour, label=name, ls="none")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return figure
