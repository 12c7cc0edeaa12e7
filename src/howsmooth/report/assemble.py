"""From a model and a text to a report: measure, assemble, save."""

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, final

from torch import nn

from howsmooth.errors import BadInputError, HowSmoothError
from howsmooth.models import PACKAGED, Model
from howsmooth.progress import Progress
from howsmooth.report.answer import answer, findings, plain
from howsmooth.report.figures import draw_figures
from howsmooth.report.page import write_page
from howsmooth.run import Engine, claim_folder, writing
from howsmooth.settings import flag
from howsmooth.settings import number as number_in
from howsmooth.study.answers import Methods, ReportData, Token
from howsmooth.study.ceilings import BoundsRow, bounds_of
from howsmooth.study.changes import ChangeRow
from howsmooth.study.charts import number
from howsmooth.study.heads import HeadRow
from howsmooth.study.influence import InfluenceRow
from howsmooth.study.jobs import Job, Measured, Row, run_here, run_sweep, to_frame
from howsmooth.study.layers import LayerRow
from howsmooth.study.lengths import fit_columns
from howsmooth.study.maps_beside import MapRow
from howsmooth.study.nearby import NearRow
from howsmooth.study.positions import position_break
from howsmooth.study.question import Extras, questions
from howsmooth.study.reader import ALICE, Reader
from howsmooth.study.scope import ScopeOptions, Setting, setting_of, with_scope
from howsmooth.study.swapped import VariantRow
from howsmooth.study.token import FrozenRow

if TYPE_CHECKING:
    import pandas

_SHOWN = 4096  # tokens of a passage that a page can show


@final
@dataclass(frozen=True)
class Report:
    """What was found of a model. `save` writes the page, figures and tables; `str()` is the answer in words.

    Attributes:
        data: What the page is drawn from.
        failures: Why tasks gave nothing.
    """

    data: ReportData
    failures: tuple[str, ...] = ()

    @property
    def rows(self) -> list[Row]:
        """Every measurement."""
        return [row for row in self.data.rows if isinstance(row, Row)]

    @property
    def answer(self) -> list[str]:
        """Which layer amplifies most, how bad that is, why, and what to do."""
        return [plain(sentence) for sentence in answer(self.data)]

    @property
    def findings(self) -> list[str]:
        """Every piece of advice with its evidence, and notes."""
        return [plain(sentence) for sentence in findings(self.data)]

    def to_frame(self) -> "pandas.DataFrame":
        """Measurements of layers and heads, with the exponent of their layer beside them; those with a token held fixed and
        those of other maps, by `kind`."""
        fits = self.data.fits
        whole = [row for row in self.rows if isinstance(row, LayerRow | HeadRow)]
        lines = [row.to_dict() | fit_columns(fits.get(row.layer)) for row in whole]
        beside = [row.to_dict() | fit_columns(None) for row in self.rows if isinstance(row, FrozenRow | MapRow)]
        frame = to_frame(lines + beside)
        return frame.assign(**{f"version_{k}": v for k, v in self.data.methods.versions.items()})

    def save(self, folder: str | Path, *, force: bool = False, figures: bool = True) -> Path:
        """Write `index.html`, a table for each part of it and, with `figures`, `figures/`; the page.

        A folder that holds something is refused unless `force`, which replaces these and leaves everything else alone.
        """
        page = write_page(self.data, folder, force=force)
        if figures:
            draw_figures(self.data, page.parent / "figures")
        with writing(page.with_name("measurements.csv")) as part:
            self.to_frame().to_csv(part, index=False)
        tables = {
            "bounds.csv": [beside.cells() for beside in bounds_of(self.data)],
            "near.csv": [line for row in self.data.of(NearRow) for line in row.lines()],
            "radii.csv": [row.to_dict() for row in self.data.of(ChangeRow)],
            "variants.csv": [row.to_dict() for row in self.data.of(VariantRow)],
            "influence.csv": [line for row in self.data.of(InfluenceRow)[:1] for line in row.lines()],
        }
        for name, rows in tables.items():
            if rows:
                with writing(page.with_name(name)) as part:
                    to_frame(rows).to_csv(part, index=False)
        return page

    def to_dict(self) -> dict[str, Any]:
        return {
            "answer": self.answer,
            "findings": self.findings,
            "fits": {str(layer): fit.to_dict() for layer, fit in self.data.fits.items()},
            "rows": [row.to_dict() for row in self.rows],
            "failures": list(self.failures),
        }

    def __str__(self) -> str:
        return "\n".join(self.answer + self.findings)

    __repr__ = __str__


@with_scope()
def inspect(
    model: Model | nn.Module | str | Path,
    text: str | Sequence[int] | None = None,
    *,
    radii: float | None = None,
    variants: bool = False,
    progress: Progress | bool | None = None,
    **scope: Unpack[ScopeOptions],
) -> Report:
    """Measure every layer and head of a model on a text at several lengths, and set it beside theory.

    Args:
        model: Loaded, or what `load` takes.
        text: The text itself or token ids; Alice in Wonderland by default.
        lengths: By default those of 8 … 512 that the model and the text allow.
        samples: Windows of the text at each length.
        layers: All by default.
        map: As in `Model.measure`.
        tol: As in `howsmooth.lipschitz`.
        certify: As in `howsmooth.lipschitz`.
        seed: Places the samples.
        radii: Also the radii within which the output of a layer moves by at most this part of its length, by layer and
            sample.
        variants: Also put other kinds of attention into the layers.
        progress: A bar where a person watches; False for none.

    Returns:
        The report. `save(folder)` writes the page, figures and tables; `answer` and `findings` are its sentences.

        >>> howsmooth.inspect("demo").save("report")  # doctest: +SKIP
        PosixPath('report/index.html')
    """
    reader, setting = setting_of(model, text, scope)
    variants = flag(variants, "variants")
    named = ALICE if text is None else "a text"

    def run(jobs: list[Job], here: bool = False) -> Measured:
        return run_here(reader, jobs, False if here else progress)

    return _report(reader, setting, named, "howsmooth.inspect", run, Extras(_part(radii), variants))


def inspect_into(
    reader: Reader,
    setting: Setting,
    folder: str | Path,
    command: str,
    *,
    engine: Engine | None = None,
    resume: bool = False,
    force: bool = False,
    figures: bool = True,
    radii: float | None = None,
    variants: bool = False,
    progress: Progress | bool | None = None,
) -> tuple[Report, Path]:
    """A report by a sweep that keeps its results in `folder/results.sqlite`, saved in that folder, and the path of its page.

    reader: from `Reader.by_name`.  command: what makes the report again.  resume, force: go on in a folder that holds results,
    or start anew there; it is refused otherwise.  radii, variants: as in `inspect`.
    """
    radii = _part(radii)
    if reader.source is None:
        raise BadInputError("expected a model and a text by name, got ones built in memory; use howsmooth.inspect")
    results = claim_folder(folder, "report", resume=resume, force=force)
    named = ALICE if reader.source.text is None else Path(reader.source.text).name

    begun = False

    def run(jobs: list[Job], here: bool = False) -> Measured:
        nonlocal begun
        again, begun = resume or begun, True
        if here:
            return run_sweep(reader, jobs, results, resume=True, progress=False, command=command, empty=True)
        return run_sweep(reader, jobs, results, engine=engine, resume=again, progress=progress, command=command)

    report = _report(reader, setting, named, command, run, Extras(radii, variants))
    return report, report.save(folder, force=True, figures=figures)


def _part(radii: float | None) -> float | None:
    return (
        None if radii is None else number_in(radii, "radii as a part > 0", "0.1 is a tenth of the output's length", above=0.0)
    )


def measure_page(setting: Setting, extras: Extras, run: Callable[..., Measured]) -> Measured:
    """Everything a page shows: the first jobs of all questions together, then of each what depends on them."""
    ordered = sorted(questions().values(), key=lambda question: question.section.place if question.section else 0)
    steps = [question.on_page(setting, extras) for question in ordered]
    first = run([job for one in steps for job in next(one)])
    if not first.of(LayerRow):
        raise BadInputError(first.failures[0] if first.failures else "expected measurements, got none; ask for a layer")
    found = first
    for one in steps:
        try:
            jobs = one.send(first)
            while True:
                last = run(jobs, here=len(jobs) <= len(setting.layers)) if jobs else Measured()
                found += last
                jobs = one.send(last)
        except StopIteration:
            continue
        except HowSmoothError as error:  # a page without it is still a page
            found = replace(found, failures=(*found.failures, str(error)))
    return found


def _report(reader: Reader, setting: Setting, text: str, command: str, run: Callable[..., Measured], extras: Extras) -> Report:
    """The report in what `run` measures; `here`, in this process, what is known to be wanted once the rest is there."""
    began = time.perf_counter()
    measured = measure_page(setting, extras, run)
    methods = replace(_methods(reader, setting, text, command, measured), seconds=time.perf_counter() - began)
    data = ReportData(measured.rows, methods)
    texts, notes = _texts(reader, setting.starts[0], data), _notes(reader, setting, data, measured.failures)
    return Report(replace(data, texts=texts, notes=notes), measured.failures)


def _methods(reader: Reader, setting: Setting, text: str, command: str, measured: Measured) -> Methods:
    """How it was measured; a folder or file by its name, since pages travel and paths say where they come from."""
    name, path = reader.model.name, Path(reader.model.name)
    short = path.resolve().name if path.is_dir() else path.name if path.is_file() else name
    return Methods(
        model=f"{name} ({PACKAGED[name].what})" if name in PACKAGED else short,
        text=text,
        map=setting.scope.map,
        command=_without_paths(command),
        versions=measured.versions,
        seed=setting.scope.seed,
        tol=setting.scope.tol,
        date=time.strftime("%Y-%m-%d"),
    )


def _without_paths(command: str) -> str:
    """A command with what lies on this machine by its name alone.

    >>> _without_paths("howsmooth report /usr/bin --tol 1e-2")
    'howsmooth report bin --tol 1e-2'
    """
    try:
        words = shlex.split(command)
    except ValueError:  # an unclosed quote is no command
        return command
    return shlex.join(Path(word).name if os.sep in word and Path(word).exists() else word for word in words)


def variants_report(reader: Reader, setting: Setting, measured: Measured, command: str) -> Report:
    """The page of a study of variants: kinds side by side, and the layers with softmax in them as the layers of the page."""
    rows = [row for row in measured.of(VariantRow) if row.variant == "softmax" and row.factor == 1]
    source = None if reader.source is None else reader.source.text
    methods = _methods(reader, setting, ALICE if source is None else Path(source).name, command, measured)
    notes = ("Every layer on this page is the model's own with softmax put in, beside other kinds of attention.",)
    notes += _failed(measured.failures)
    layers = [LayerRow.of(row.to_dict()) for row in rows]
    return Report(ReportData([*layers, *measured.of(VariantRow)], methods, notes=notes), measured.failures)


def _texts(reader: Reader, start: int, data: ReportData) -> dict[int, list[Token]]:
    """The tokens of the first sample at every length, where each has a share in every layer."""
    texts = {}
    for n, shares in data.shares.items():
        pieces = reader.window(n, start).pieces if n <= _SHOWN else ()
        if all(len(own) == len(pieces) for own in shares.values()):
            texts[n] = [(piece.gap, piece.text, piece.special) for piece in pieces]
    return texts


def _notes(reader: Reader, setting: Setting, data: ReportData, failures: tuple[str, ...]) -> tuple[str, ...]:
    """What a reader of the page should know, in words."""
    notes = []
    for before, after in sorted({(jump.before, jump.after) for _, jump in data.jumps}):
        there = position_break(reader.model, before, after)
        if there is not None:
            notes.append(
                f"The model's position embeddings break there too: those of positions {there.position - 1} and "
                f"{there.position} are {number(there.step)} apart, neighbours elsewhere {number(there.typical)} in the median."
            )
    lacking = [said for question in questions().values() for said in question.lacking(setting)]
    notes += [f"{note[:1].upper()}{note[1:]}." for note in (*reader.model.notes, *lacking)]
    whole = sorted({row.layer for row in data.of(LayerRow) if not row.cut})
    if whole:
        named = ", ".join(map(str, whole))
        notes.append(f"In layers {named} attention is the model's own code, differentiated as it is.")
    if data.methods.map == "attention" and not bounds_of(data):
        notes.append("Bounds, splitting and worst inputs need attention as a formula of its weights; no layer here is one.")
    without = {row.layer: row.reason for row in data.of(BoundsRow) if row.reason}
    if without:
        named = ", ".join(str(layer) for layer in sorted(without))
        notes.append(f"In layers {named} there are no bounds: {without[min(without)]}.")
    return (*notes, *_failed(failures))


def _failed(failures: tuple[str, ...]) -> tuple[str, ...]:
    return (f"{len(failures)} tasks gave nothing; the first: {failures[0]}",) if failures else ()
