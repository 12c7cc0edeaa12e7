"""Files and folders that people keep: written whole or not at all, never over something without being asked to."""

import contextlib
import errno
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from howsmooth.errors import BadInputError, ResultsError
from howsmooth.run.store import Record, Store, read
from howsmooth.settings import shown

if TYPE_CHECKING:
    import pandas

RESULTS = "results.sqlite"


@contextlib.contextmanager
def writing(path: str | Path, *, parents: bool = False) -> Iterator[Path]:
    """A hidden path to write to, which takes the place of `path` when all went well; otherwise nothing is left behind.

    parents: make the folders on the way. What the system refuses is one sentence, a `ResultsError`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with writing(f"{folder}/note.txt") as part:
    ...         _ = part.write_text("whole")
    ...     [path.name for path in Path(folder).iterdir()]
    ['note.txt']
    """
    path = Path(path)
    part = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")  # some writers look at the ending
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        os.replace(part, path)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def check_writable(path: str | Path) -> None:
    """Refuse before any work a file that could not be written after it: a hidden one is made in its place and removed.

    Folders on the way that are missing are not made; the nearest one that is there must take a file.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        folder = next(f for f in path.parents if f.exists())
        part = folder / f".{path.stem}.{os.getpid()}.part{path.suffix}"
        part.open("xb").close()
        part.unlink()
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError | ValueError) -> ResultsError:
    said = (error.strerror if isinstance(error, OSError) else None) or error
    return ResultsError(f"expected a file that can be written, got {path} ({said}); choose another folder")


def check_folder(folder: str | Path, what: str, *, resume: bool = False, force: bool = False) -> None:
    """Refuse a folder that holds something, unless to go on with its results (`resume`) or to write into it (`force`).

    what: the word for what the folder is for, a report say.
    """
    if not isinstance(folder, str | os.PathLike):
        raise BadInputError(f"expected a folder for the {what}, got {shown(folder)}; give its path")
    folder = Path(folder)
    results = folder / RESULTS
    if resume and force:
        raise BadInputError("expected resume (--resume) or force (--force), got both; resume continues, force starts again")
    if folder.exists() and not folder.is_dir():
        raise BadInputError(f"expected a folder for the {what}, got the file {folder}; choose another name")
    if force or not folder.exists() or not any(folder.iterdir()):
        return
    if resume and not results.exists():
        raise BadInputError(
            f"expected {results} to resume, got a folder without it; pass force=True (--force) to write into it"
        )
    if not resume:
        forced = "force=True (--force)"
        known = results.exists()
        more = f"resume=True (--resume) to continue, or {forced} to start again" if known else f"{forced} to write into it"
        raise BadInputError(f"expected a new folder for the {what}, got {folder}, which exists; pass {more}")


def claim_folder(folder: str | Path, what: str, *, resume: bool = False, force: bool = False) -> Path:
    """Where the results of a sweep go in a folder that `check_folder` lets through; with `force`, earlier ones are removed."""
    check_folder(folder, what, resume=resume, force=force)
    results = Path(folder) / RESULTS
    if force:
        remove_results(results)
    return results


def remove_results(path: Path) -> None:
    """Remove a results file that is there; not another version's, another program's, or one that is being written."""
    if path.exists():
        Store(path, resume=True).close()  # refuses those
        path.unlink()


def to_frame(path: str | Path) -> "pandas.DataFrame":
    """A results file as a pandas data frame: a row for each value of a task, one for a task that failed.

    Args:
        path: Of the file.

    Returns:
        A frame with the arguments, the values, then how it went. Where a task returns a value under the name of an argument,
        the value is kept. Lists and dictionaries become JSON text.
    """
    import pandas

    return pandas.DataFrame.from_records([row for record in read(path) for row in _flat(record)])


def _flat(record: Record) -> Iterator[dict[str, Any]]:
    about = {f"setup_{k}": v for k, v in record.setup.items() if k != "function"}
    about |= {"status_of_task": record.status, "reason": record.reason, "task_seconds": record.seconds, "tries": record.tries}
    about |= {"task": record.key, "function": record.function} | {f"version_{k}": v for k, v in record.versions.items()}
    for value in record.value if isinstance(record.value, list) else [record.value]:
        cells = value if isinstance(value, dict) else {} if value is None else {"value": value}
        row = record.arguments | cells | about
        yield {k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()}


def write_table(path: str | Path, out: str | Path, *, force: bool = False) -> Path:
    """Write a results file as a table.

    Args:
        path: Of the results file.
        out: Of the table, .csv or .parquet.
        force: Replace a table that is there.

    Returns:
        The table's path.
    """
    out = Path(out)
    if out.suffix not in (".csv", ".parquet"):
        raise BadInputError(f"expected a file named .csv or .parquet, got {out.name}; change its ending")
    if out.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise BadInputError("expected the package pyarrow for Parquet, which is missing; pip install 'howsmooth[parquet]'")
    if out.exists() and not force:
        raise ResultsError(f"expected a new file, got {out}, which exists; pass force=True (--force) to overwrite it")
    frame = to_frame(path)
    with writing(out) as part:
        frame.to_csv(part, index=False) if out.suffix == ".csv" else frame.to_parquet(part, index=False)
    return out
