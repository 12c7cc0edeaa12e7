"""A worker as a program, `python -m howsmooth.run.serve`: a line of JSON in for each task, a line out for each answer.

Everything in a plan is plain JSON, so nothing has to be pickled and a script that sweeps needs no `__main__` guard.
"""

import json
import os
import signal
import sys
import threading
from queue import SimpleQueue
from typing import Any

from howsmooth.run.plan import Call
from howsmooth.run.worker import Worker


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a task prints must not mix with the answers
    lines: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    hello = json.loads(lines.get())
    worker = Worker(Call(**hello["setup"]) if hello["setup"] else None)
    _write(answers, worker.prepare())
    while True:
        _write(answers, worker.perform(Call(**json.loads(lines.get()))))


def _listen(lines: "SimpleQueue[str]") -> None:
    """Pass lines on; the end of the input is the end of the parent, so of this process, whatever it is doing."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def _write(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
