"""Results as a table: a data frame, a CSV file or a Parquet file."""

import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from howsmooth.errors import BadInputError, ResultsError
from howsmooth.run.store import Row, read

if TYPE_CHECKING:
    import pandas


def records(rows: list[Row]) -> list[dict[str, Any]]:
    """A flat record per row of every task: its arguments, its values, then how it went. A failed task has one record.

    Where a task returns a value under the name of an argument, the value is kept. Lists and dictionaries become JSON text.
    """
    flat = []
    for row in rows:
        values = row.value if isinstance(row.value, list) else [row.value]
        for value in values:
            cells = row.arguments | (value if isinstance(value, dict) else {} if value is None else {"value": value})
            state = {"status_of_task": row.status, "reason": row.reason, "task_seconds": row.seconds, "tries": row.tries}
            named = {f"setup_{k}": v for k, v in row.setup.items() if k != "function"}
            software = {f"version_{k}": v for k, v in row.versions.items()}
            whole = cells | named | state | {"task": row.key, "function": row.function} | software
            flat.append({k: _plain(v) for k, v in whole.items()})
    return flat


def to_frame(path: str | Path) -> "pandas.DataFrame":
    """The records of a results file as a pandas data frame."""
    import pandas

    return pandas.DataFrame.from_records(records(read(path)))


def write_table(path: str | Path, out: str | Path, *, force: bool = False) -> Path:
    """Write the records of a results file to `out`, .csv or .parquet; an existing file stays unless `force`."""
    out = Path(out)
    if out.suffix not in (".csv", ".parquet"):
        raise BadInputError(f"expected a file named .csv or .parquet, got {out.name}; change its ending")
    if out.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise BadInputError("expected the package pyarrow for Parquet, which is missing; pip install 'howsmooth[parquet]'")
    if out.exists() and not force:
        raise ResultsError(f"expected a new file, got {out}, which exists; pass --force to replace it")
    frame = to_frame(path)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")  # whole or not at all
    try:
        if out.suffix == ".csv":
            frame.to_csv(part, index=False)
        else:
            frame.to_parquet(part, index=False)
        os.replace(part, out)
    except OSError as error:
        raise ResultsError(
            f"expected a file that can be written, got {out} ({error.strerror or error}); choose another folder"
        ) from None
    finally:
        part.unlink(missing_ok=True)
    return out


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value
