"""Tasks for sweeps: functions that workers import by name. Files in a folder count what happened and where."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from howsmooth.errors import BadInputError
from howsmooth.run import Record


def same(left: list[Record], right: list[Record]) -> bool:
    """The same answers in the same order, whatever time they took."""
    return [(r.key, r.arguments, r.status, r.value) for r in left] == [(r.key, r.arguments, r.status, r.value) for r in right]


def gone(pid: int) -> bool:
    """Whether a process has ended, within a while."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def value(i: int) -> dict[str, Any]:
    """A row that depends on its argument alone. A process with PAUSE takes as many seconds for each."""
    time.sleep(float(os.environ.get("PAUSE", "0")))
    return {"square": i * i, "root": i**0.5, "label": f"row {i}", "list": [i, None, "é\n"]}


def build(base: int, folder: str | None = None) -> dict[str, Any]:
    """A state that leaves a mark each time it is built: the threads its worker may use."""
    if folder is not None:
        Path(folder, f"built-{os.getpid()}-{time.monotonic_ns()}").write_text(os.environ.get("OMP_NUM_THREADS", ""))
    return {"base": base, "pid": os.getpid()}


def shifted(state: dict[str, Any], i: int) -> dict[str, Any]:
    return {"shifted": state["base"] + i}


def refuse_to_build() -> None:
    raise BadInputError("expected a model, got none; name one")


def break_to_build() -> None:
    raise RuntimeError("no weights")


def die_to_build() -> None:
    os._exit(3)


def die(i: int, folder: str, times: int) -> dict[str, Any]:
    """Kills its own worker the first `times` times that task `i` is tried."""
    seen = Path(folder, f"tried-{i}")
    tried = len(seen.read_text()) if seen.exists() else 0
    seen.write_text("x" * (tried + 1))
    if tried < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"i": i}


def moody(i: int, folder: str, times: int) -> dict[str, Any]:
    """Raises the first `times` times that task `i` is tried; its row says nothing of where it was made."""
    seen = Path(folder, f"moody-{i}")
    tried = len(seen.read_text().splitlines()) if seen.exists() else 0
    with seen.open("a") as file:
        file.write(f"{os.getpid()}\n")
    if tried < times:
        raise RuntimeError("not enough memory")
    return {"i": i}


def interrupted(i: int, folder: str) -> dict[str, Any]:
    """Ctrl-C, the first time that task 3 is tried."""
    seen = Path(folder, "interrupted")
    if i == 3 and not seen.exists():
        seen.touch()
        raise KeyboardInterrupt
    return {"i": i}


def fussy(i: int) -> dict[str, Any]:
    """Fails in every way a task can, for some of its arguments."""
    if i % 5 == 1:
        raise BadInputError(f"expected an i that is not {i}, got {i}; take another")
    if i % 5 == 2:
        raise ZeroDivisionError("a line\nand another")
    if i % 5 == 3:
        return {"object": object()}
    print("loud", i)
    return {"i": i, "nan": float("nan")}


def threaded(text: str) -> None:
    """Prints from a thread of its own."""
    thread = threading.Thread(target=print, args=(text,))
    thread.start()
    thread.join()


def located(i: int, folder: str, pause: float = 0.02) -> dict[str, Any]:
    """Leaves its worker's process id behind, and what it is at."""
    Path(folder, f"pid-{os.getpid()}").write_text(str(i))
    time.sleep(pause)
    Path(folder, f"did-{i}").touch()
    return {"i": i}


def several(count: int) -> list[dict[str, Any]]:
    return [{"part": i} for i in range(count)]
