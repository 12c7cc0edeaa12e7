"""A progress bar with rate and time left, on a terminal only."""

import sys
from typing import Any, final


class Progress:
    """What a sweep tells while it runs: where nothing is overridden, nothing. Use as a context manager."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, total: int, done: int) -> None:
        """`done` of `total` tasks were finished earlier."""

    def advance(self, failed: bool) -> None:
        """One more task has ended."""


@final
class Silent(Progress):
    """Says nothing."""


@final
class Bar(Progress):
    """A rich progress bar on standard error."""

    def __init__(self, title: str, console: Any = None):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Rich

        self._rich = Rich(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left{task.fields[failed]}"),
            console=console or Console(stderr=True),
            transient=True,
            expand=True,
        )
        self._title, self._failed, self._new = title, 0, 0

    def __exit__(self, *_: object) -> None:
        self._rich.stop()

    def begin(self, total: int, done: int) -> None:
        self._rich.start()
        self._task = self._rich.add_task(self._title, total=total, completed=done, rate="", failed="")

    def advance(self, failed: bool) -> None:
        self._failed += failed
        self._new += 1
        elapsed = self._rich.tasks[0].elapsed or 0.0
        rate = f"{self._new / elapsed:.3g}/s" if elapsed > 0 else ""
        note = f", {self._failed} failed" if self._failed else ""
        self._rich.update(self._task, advance=1, rate=rate, failed=note)


def progress_bar(title: str, *, quiet: bool = False) -> Progress:
    """A bar where a person is watching; nothing when standard error is piped, or when asked to be quiet."""
    return Silent() if quiet or not sys.stderr.isatty() else Bar(title)
