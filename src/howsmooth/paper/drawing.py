"""What the figures of all experiments share: where they go, and the table beside them."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from howsmooth.errors import BadInputError
from howsmooth.run import check_writable, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Drawn: TypeAlias = "Figure | None"  # nothing where there is nothing to draw


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> "tuple[Figure, Any]":
    """A figure, in inches, that belongs to no window, and its axes. options: as in matplotlib's `Figure.subplots`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def check_figure(path: Path) -> None:
    """Refuse, before any work, a name that no figure can have and a place where none can be written."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise BadInputError(f"expected a figure named .png, .pdf or .svg, got {path.name}; change its ending")
    if not path.parent.is_dir():
        raise BadInputError(f"expected a folder for the figure, got {path.parent}, which is none; make it first")
    check_writable(path)


def save_figure(figure: "Figure", path: Path) -> Path:
    """Whole or not at all."""
    with writing(path) as part:
        figure.savefig(part, dpi=160)
    return path


def save_both(figure: "Figure", stem: Path) -> list[Path]:
    """As PNG and PDF."""
    return [save_figure(figure, stem.with_suffix(ending)) for ending in (".png", ".pdf")]


def save_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Rows as CSV, whole or not at all."""
    with writing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def make_folder(path: Path) -> Path:
    """The folder, made if it is not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(
            f"expected a folder for the results, got {path} ({error.strerror}); choose another folder with out (--out)"
        ) from None
    return path
