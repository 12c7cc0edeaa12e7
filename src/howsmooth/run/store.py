"""Results in one SQLite file: each row committed as it arrives, one writer at a time.

Every row carries a checksum of all that is in it, and the file a count of its rows and the exclusive or of their checksums, so
a row that was damaged, moved or lost is seen when the file is read.
"""

import contextlib
import functools
import hashlib
import json
import operator
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, final

from howsmooth.errors import ResultsError
from howsmooth.run.plan import Plan, Task

VERSION = 2
_PATIENCE = 30.0  # seconds to wait for another program's lock
_APPLICATION = 0x686F7773  # "hows", so that another program's SQLite file is not taken for ours

_TABLES = """
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, started REAL NOT NULL, pid INTEGER NOT NULL, engine TEXT NOT NULL, command TEXT NOT NULL,
    versions TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE results (
    key TEXT PRIMARY KEY, position INTEGER NOT NULL, function TEXT NOT NULL, arguments TEXT NOT NULL, setup TEXT,
    status TEXT NOT NULL CHECK (status IN ('done', 'failed')), value TEXT, reason TEXT, tries INTEGER NOT NULL,
    seconds REAL NOT NULL, finished REAL NOT NULL, run INTEGER NOT NULL REFERENCES runs(id), checksum INTEGER NOT NULL)
    WITHOUT ROWID;
CREATE TABLE tally (rows INTEGER NOT NULL, checksum INTEGER NOT NULL); -- one row: of the results
INSERT INTO tally VALUES (0, 0);
"""
_RUN = "id, started, pid, engine, command, versions, checksum"
_RESULT = "key, position, function, arguments, setup, status, value, reason, tries, seconds, finished, run, checksum"

Status = Literal["done", "failed"]


@final
@dataclass(frozen=True)
class Outcome:
    """How a task ended: its value as JSON, or the reason why there is none.

    ending: `failed` may go better another time; `refused` is our own refusal, which would come again anywhere; `died` is the
    end of the worker too.
    """

    ending: Literal["done", "failed", "refused", "died"]
    value: str | None = None
    reason: str | None = None
    tries: int = 1
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        return "done" if self.ending == "done" else "failed"


@final
@dataclass(frozen=True)
class Record:
    """One finished task as the file keeps it."""

    key: str
    function: str
    arguments: dict[str, Any]
    setup: dict[str, Any]
    status: Status
    value: Any
    reason: str | None
    tries: int
    seconds: float
    versions: dict[str, str]


@final
class Store(contextlib.AbstractContextManager["Store"]):
    """The one writer of a results file. Use as a context manager; reading needs no `Store`, see `read`.

    path: created if missing.  resume: whether a file that has results may be continued.
    """

    def __init__(self, path: str | Path, *, resume: bool = False):
        self.path, self._run, self._positions = Path(path), 0, {}
        with contextlib.ExitStack() as stack, _sentence(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_alone(self.path))
            connection = sqlite3.connect(self.path, timeout=_PATIENCE, isolation_level=None)
            self._connection = stack.enter_context(contextlib.closing(connection))
            self._open(resume)
            self._resources = stack.pop_all()

    def _open(self, resume: bool) -> None:
        db = self._connection
        tables, owner = _number(db, "SELECT count(*) FROM sqlite_master"), _number(db, "PRAGMA application_id")
        if tables == owner == 0:
            db.execute("PRAGMA journal_mode=WAL")
            with db:
                db.execute("BEGIN IMMEDIATE")
                for table in _TABLES.split(";")[:-1]:
                    db.execute(table)
                db.execute(f"PRAGMA application_id={_APPLICATION}")
                db.execute(f"PRAGMA user_version={VERSION}")
        _check_version(db, self.path)
        count = _number(db, "SELECT count(*) FROM results")
        if count and not resume:
            raise ResultsError(
                f"expected a new results file, got {self.path} with {count} results; pass resume=True (--resume) "
                "to continue it, or choose another name"
            )
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")  # a committed row survives a power cut

    def begin(self, plan: Plan, engine: str, command: str, versions: Mapping[str, str]) -> dict[str, Status]:
        """Start a run: note who writes, and return what the file already knows of the plan, by key."""
        self._positions = {task.key: i for i, task in enumerate(plan.tasks)}
        with _sentence(self.path), self._connection as db:
            db.execute("BEGIN IMMEDIATE")
            results, runs = _rows(db, self.path)
            self._run = max(runs, default=0) + 1
            run = (self._run, time.time(), os.getpid(), engine, _text(command), json.dumps(dict(versions), sort_keys=True))
            _insert(db, "runs", (*run, _checksum(run)))
            for old in results:
                key, position = old[0], self._positions.get(old[0])
                if position is not None and position != old[1]:
                    moved = (key, position, *old[2:-1])
                    self._replace(db, (*moved, _checksum(moved)), old[-1])
        return {row[0]: row[5] for row in results if row[0] in self._positions}

    def add(self, task: Task, outcome: Outcome, position: int | None = None) -> None:
        """Commit one result; a later one for the same task takes its place. position: of a task that is in no plan."""
        setup = None if task.setup is None else json.dumps({"function": task.setup.function, **task.setup.kwargs()})
        position = self._positions[task.key] if position is None else position
        row = (task.key, position, task.function, task.arguments, setup, outcome.status, outcome.value)
        row += (None if outcome.reason is None else _text(outcome.reason), outcome.tries, float(outcome.seconds))
        row += (time.time(), self._run)
        with _sentence(self.path), self._connection as db:
            db.execute("BEGIN IMMEDIATE")
            old = db.execute("SELECT checksum FROM results WHERE key = ?", (task.key,)).fetchone()
            self._replace(db, (*row, _checksum(row)), None if old is None else old[0])

    @staticmethod
    def _replace(db: sqlite3.Connection, row: tuple[Any, ...], old: int | None) -> None:
        """Put a row in place of the one with the checksum `old`, and count it."""
        rows, checksum = db.execute("SELECT rows, checksum FROM tally").fetchone()
        _insert(db, "results", row)
        db.execute("UPDATE tally SET rows = ?, checksum = ?", (rows + (old is None), checksum ^ row[-1] ^ (old or 0)))

    def close(self) -> None:
        """Leave one plain file behind, and let the next writer in."""
        with contextlib.suppress(sqlite3.Error):  # a reader is looking, or no space: the log stays beside the file, still valid
            self._connection.execute("PRAGMA busy_timeout=0")
            self._connection.execute("PRAGMA journal_mode=DELETE")
        self._resources.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: str | Path) -> list[Record]:
    """The records of a results file in the order of its last plan; also while a sweep is writing it.

    Args:
        path: Of the file. One that was damaged since it was written is refused.

    Returns:
        A record for every task, with its arguments, its value and how it went.
    """
    path = Path(path)
    if not path.is_file():
        raise ResultsError(f"expected a results file, got {path}, which is not there; check the name")
    with _sentence(path), contextlib.closing(_reader(path)) as db:
        _check_version(db, path)
        db.execute("BEGIN")  # one moment of a file that is being written
        results, runs = _rows(db, path)
    records = []
    for values in sorted(results, key=lambda row: (row[1], row[0])):
        row: dict[str, Any] = dict(zip(_RESULT.split(", "), values, strict=True))
        row |= {"versions": runs[row["run"]], "setup": row["setup"] or "{}"}
        row |= {k: json.loads(row[k]) for k in ("arguments", "setup", "value", "versions") if row[k] is not None}
        records.append(Record(**{column.name: row[column.name] for column in fields(Record)}))
    return records


def _rows(db: sqlite3.Connection, path: Path) -> tuple[list[tuple[Any, ...]], dict[int, str]]:
    """The rows of both tables, results and versions by run, each as it was written; refused if any is not."""
    runs = db.execute(f"SELECT {_RUN} FROM runs").fetchall()
    results = db.execute(f"SELECT {_RESULT} FROM results").fetchall()
    tally = db.execute("SELECT rows, checksum FROM tally").fetchall()
    whole = all(row[-1] == _checksum(row[:-1]) for row in (*runs, *results))
    total = functools.reduce(operator.xor, (row[-1] for row in results), 0) if whole else None
    versions = {row[0]: row[5] for row in runs}
    if tally != [(len(results), total)] or any(row[-2] not in versions for row in results):
        raise ResultsError(_damaged(path, "its rows do not fit their checksums"))
    return results, versions


def _checksum(row: tuple[Any, ...]) -> int:
    """63 bits of a hash of a row."""
    return int.from_bytes(hashlib.sha256(repr(row).encode()).digest()[:8], "big") >> 1


def _insert(db: sqlite3.Connection, table: str, row: tuple[Any, ...]) -> None:
    db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({','.join('?' * len(row))})", row)


def _text(text: str) -> str:
    """Without the halves of characters that a file cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _reader(path: Path) -> sqlite3.Connection:
    """A read-only connection; in a folder that cannot be written, a file nobody writes is read as it is."""
    where = path.resolve().as_uri()
    connection = sqlite3.connect(f"{where}?mode=ro", uri=True, timeout=_PATIENCE)
    try:
        _number(connection, "SELECT count(*) FROM sqlite_master")
    except sqlite3.Error as error:
        connection.close()
        if "unable to open" not in str(error) and "readonly" not in str(error):
            raise
        connection = sqlite3.connect(f"{where}?mode=ro&immutable=1", uri=True)
    return connection


def _number(connection: sqlite3.Connection, query: str) -> int:
    return connection.execute(query).fetchone()[0]


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that this version of the package cannot read."""
    if _number(connection, "PRAGMA application_id") != _APPLICATION:
        raise ResultsError(f"expected a results file of howsmooth, got {path}, another program's database; choose another name")
    version = _number(connection, "PRAGMA user_version")
    if version != VERSION:
        raise ResultsError(
            f"expected a results file of version {VERSION}, got {path} of version {version}; "
            "choose another name, or read it with the howsmooth that wrote it"
        )


@contextlib.contextmanager
def _sentence(path: Path) -> Iterator[None]:
    """Errors of SQLite and of the system, each as one sentence."""
    try:
        yield
    except OSError as error:
        what = f"expected a results file that can be written, got {path} ({error.strerror})"
        raise ResultsError(f"{what}; choose another folder") from None
    except (sqlite3.Error, MemoryError, UnicodeError, TypeError) as error:  # the last three: damaged lengths and texts
        text = "".join(c if c.isprintable() else " " for c in str(error)[:200]) or type(error).__name__
        if "locked" in text:
            message = f"expected {path} unlocked, got a lock of another program; end that program first"
        elif any(sign in text for sign in ("disk is full", "disk I/O", "readonly", "unable to open")):
            message = f"expected room to write {path}, got: {text}; what was done is kept, make room and resume"
        else:
            message = _damaged(path, text)
        raise ResultsError(message) from None


def _damaged(path: Path, how: str) -> str:
    return f"expected a results file as it was written, got {path} ({how}); restore a copy of it, or choose another name"


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A lock on a side file, held by the operating system for the life of the process: a killed writer leaves none behind."""
    import fcntl

    side = path.with_name(path.name + ".lock")
    while True:
        with side.open("a+", encoding="ascii", errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read(32).strip() or "unknown"
                raise ResultsError(
                    f"expected a results file that no other process writes, got {path}, which process {holder} is writing; "
                    "wait for it, or end it first"
                ) from None
            if not _is_at(file.fileno(), side):
                continue  # the last holder removed the file between our opening and our locking it
            try:
                file.truncate(0)
                print(os.getpid(), file=file, flush=True)
                yield
            finally:
                side.unlink(missing_ok=True)  # before the lock goes, or we would remove the next holder's
            return


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
