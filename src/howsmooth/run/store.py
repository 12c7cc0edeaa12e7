"""Results in one SQLite file: each row committed as it arrives, one writer at a time."""

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from howsmooth.errors import ResultsError
from howsmooth.run.plan import Plan, Task

VERSION = 1
_APPLICATION = 0x686F7773  # "hows", so that another program's SQLite file is not taken for ours

_SCHEMA = """
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, started REAL NOT NULL, pid INTEGER NOT NULL, engine TEXT NOT NULL, command TEXT NOT NULL,
    versions TEXT NOT NULL);
CREATE TABLE results (
    key TEXT PRIMARY KEY, position INTEGER NOT NULL, function TEXT NOT NULL, arguments TEXT NOT NULL, setup TEXT,
    status TEXT NOT NULL CHECK (status IN ('done', 'failed')), value TEXT, reason TEXT, tries INTEGER NOT NULL,
    seconds REAL NOT NULL, finished REAL NOT NULL, run INTEGER NOT NULL REFERENCES runs(id)) WITHOUT ROWID;
"""

State = Literal["done", "failed"]


@final
@dataclass(frozen=True)
class Outcome:
    """How a task ended: its value as JSON, or the reason why there is none."""

    task: Task
    status: State
    value: str | None
    reason: str | None
    tries: int
    seconds: float


@final
@dataclass(frozen=True)
class Row:
    """One finished task as the file keeps it."""

    key: str
    function: str
    arguments: dict[str, Any]
    setup: dict[str, Any]
    status: State
    value: Any
    reason: str | None
    tries: int
    seconds: float
    versions: dict[str, str]


@final
class Store:
    """The one writer of a results file. Use as a context manager; reading needs no `Store`, see `read`.

    path: created if missing.  resume: whether a file that has results may be continued.
    """

    def __init__(self, path: str | Path, *, resume: bool = False):
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _Lock(self.path)
        except OSError as error:
            raise ResultsError(
                f"expected a results file that can be written, got {self.path} ({error.strerror}); choose another folder"
            ) from None
        try:
            self._connection = self._open(resume)
        except BaseException:
            self._lock.release()
            raise
        self._run = 0

    def _open(self, resume: bool) -> sqlite3.Connection:
        with _sentence(self.path):
            connection = sqlite3.connect(self.path, timeout=30, isolation_level=None)
            try:
                if _is_new(connection):
                    connection.execute("PRAGMA journal_mode=WAL")
                    connection.execute("BEGIN EXCLUSIVE")
                    for statement in filter(str.strip, _SCHEMA.split(";")):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA application_id={_APPLICATION}")
                    connection.execute(f"PRAGMA user_version={VERSION}")
                    connection.execute("COMMIT")
                check_version(connection, self.path)
                held = connection.execute("SELECT count(*) FROM results").fetchone()[0]
                if held and not resume:
                    raise ResultsError(
                        f"expected a new results file, got {self.path} with {held} results; resume it or choose another name"
                    )
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=FULL")  # a committed row survives a power cut
            except BaseException:
                connection.close()
                raise
            return connection

    def begin(self, plan: Plan, engine: str, command: str, versions: Mapping[str, str]) -> dict[str, State]:
        """Start a run: note who writes, and return what the file already knows of the plan, by key."""
        with _sentence(self.path), self._transaction() as db:
            self._run = db.execute(
                "INSERT INTO runs (started, pid, engine, command, versions) VALUES (?, ?, ?, ?, ?)",
                (time.time(), os.getpid(), engine, command, json.dumps(dict(versions), sort_keys=True)),
            ).lastrowid
            known = dict(db.execute("SELECT key, status FROM results"))
            places = [(i, t.key) for i, t in enumerate(plan.tasks) if t.key in known]
            db.executemany("UPDATE results SET position = ? WHERE key = ?", places)
        self._positions = {task.key: i for i, task in enumerate(plan.tasks)}
        return {key: known[key] for _, key in places}

    def add(self, outcome: Outcome) -> None:
        """Commit one result; a later one for the same task takes its place."""
        task = outcome.task
        setup = None if task.setup is None else json.dumps({"function": task.setup.function, **task.setup.kwargs()})
        row = (
            task.key,
            self._positions[task.key],
            task.call.function,
            task.call.arguments,
            setup,
            outcome.status,
            outcome.value,
            outcome.reason,
            outcome.tries,
            outcome.seconds,
            time.time(),
            self._run,
        )
        with _sentence(self.path), self._transaction() as db:
            db.execute(f"INSERT OR REPLACE INTO results VALUES ({','.join('?' * len(row))})", row)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back already
                self._connection.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Leave one plain file behind, and let the next writer in."""
        with contextlib.suppress(sqlite3.Error):  # a reader is looking, or no space: the log stays beside the file, still valid
            self._connection.execute("PRAGMA busy_timeout=0")
            self._connection.execute("PRAGMA journal_mode=DELETE")
        self._connection.close()
        self._lock.release()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: str | Path) -> list[Row]:
    """The rows of a results file in the order of its last plan; also while a sweep is writing it."""
    path = Path(path)
    if not path.is_file():
        raise ResultsError(f"expected a results file, got {path}, which is not there; check the name")
    with _sentence(path), contextlib.closing(_reader(path)) as db:
        check_version(db, path)
        versions = {run: json.loads(text) for run, text in db.execute("SELECT id, versions FROM runs")}
        found = db.execute(
            "SELECT key, function, arguments, setup, status, value, reason, tries, seconds, run FROM results "
            "ORDER BY position, key"
        )
        return list(_rows(found, versions))


def _rows(found: Iterable[tuple[Any, ...]], versions: Mapping[int, dict[str, str]]) -> Iterator[Row]:
    for key, function, arguments, setup, status, value, reason, tries, seconds, run in found:
        yield Row(
            key=key,
            function=function,
            arguments=json.loads(arguments),
            setup=json.loads(setup or "{}"),
            status=status,
            value=None if value is None else json.loads(value),
            reason=reason,
            tries=tries,
            seconds=seconds,
            versions=versions[run],
        )


def _reader(path: Path) -> sqlite3.Connection:
    """A read-only connection; in a folder that cannot be written, a file nobody writes is read as it is."""
    where = path.resolve().as_uri()
    connection = sqlite3.connect(f"{where}?mode=ro", uri=True, timeout=30)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        connection = sqlite3.connect(f"{where}?mode=ro&immutable=1", uri=True)
    return connection


def _is_new(connection: sqlite3.Connection) -> bool:
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    return tables == 0 and connection.execute("PRAGMA application_id").fetchone()[0] == 0


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that this version of the package cannot read."""
    owner, version = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if owner != _APPLICATION:
        raise ResultsError(f"expected a results file of howsmooth, got {path}, another program's database; choose another name")
    if version != VERSION:
        raise ResultsError(
            f"expected a results file of version {VERSION}, got {path} of version {version}; "
            "choose another name, or read it with the howsmooth that wrote it"
        )


@contextlib.contextmanager
def _sentence(path: Path) -> Iterator[None]:
    """SQLite's errors, each as one sentence."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        text = str(error)
        if "not a database" in text or "malformed" in text:
            message = f"expected a results file, got {path} ({text}); choose another name"
        elif "locked" in text:
            message = f"expected {path} for ourselves, another program holds it locked; end that program first"
        else:
            message = f"expected room to write {path}, got: {text}; what was done is kept, make room and resume"
        raise ResultsError(message) from None


@final
class _Lock:
    """A lock on a side file, held by the operating system for the life of the process: a killed writer leaves none behind."""

    def __init__(self, path: Path):
        import fcntl

        self._path = path.with_name(path.name + ".lock")
        while True:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(self._file, 32).decode("ascii", "replace").strip()
                os.close(self._file)
                raise ResultsError(
                    f"expected {path} for ourselves, process {holder or 'unknown'} is writing it; wait for it or end it first"
                ) from None
            if self._is_current():
                break
            os.close(self._file)  # the last holder removed the file between our opening and our locking it
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            self.release()
            raise

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)  # before the lock goes, or we would remove the next holder's
        os.close(self._file)
