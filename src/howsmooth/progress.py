"""How far something is: a bar on standard error where a person watches, in a terminal or a notebook, and nothing elsewhere."""

import contextlib
import multiprocessing
import sys
import warnings
from typing import Any, TextIO, final

from howsmooth.errors import BadInputError
from howsmooth.settings import shown


class Progress(contextlib.AbstractContextManager["Progress"]):
    """What something long tells while it runs: where nothing is overridden, nothing. Use as a context manager."""

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, total: int, done: int = 0) -> None:
        """`done` of `total` tasks were finished earlier."""

    def advance(self, failed: bool = False) -> None:
        """One more task has ended."""


@final
class Bar(Progress):
    """A bar with rate and time left. What runs below it shows none of its own."""

    open = False

    def __init__(self, title: str, file: TextIO | None = None, every: float = 0.1):
        """every: seconds between two pictures of it, at least."""
        self._title, self._file, self._every, self._failed = title, file, every, 0
        self._bar: Any = None

    def __exit__(self, *_: object) -> None:
        Bar.open = False
        if self._bar is not None:
            self._bar.close()

    def begin(self, total: int, done: int = 0) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a notebook without widgets shows the bar as text
            from tqdm.auto import tqdm

            self._bar = tqdm(
                total=total,
                initial=done,
                desc=self._title,
                file=self._file,
                leave=False,
                dynamic_ncols=True,
                mininterval=self._every,
            )
        Bar.open = True

    def advance(self, failed: bool = False) -> None:
        self._failed += failed
        if failed:
            self._bar.set_postfix_str(f"{self._failed} failed", refresh=False)
        self._bar.update()


def progress_bar(title: str, progress: Progress | bool | None = None) -> Progress:
    """A bar where a person watches, and nothing where standard error is piped, in workers, and below another bar.

    Args:
        title: What stands in front of it.
        progress: What a caller asks for instead: False for no bar, or an object of their own.

    Returns:
        What shows how far it is.
    """
    if isinstance(progress, Progress):
        return progress
    if progress is not None and not isinstance(progress, bool):
        raise BadInputError(f"expected progress as True, False or a Progress, got {shown(progress)}; leave it out")
    watched = multiprocessing.parent_process() is None and (sys.stderr.isatty() or _in_notebook())
    return Bar(title) if watched and progress is not False and not Bar.open else Progress()


def _in_notebook() -> bool:
    """Whether IPython's kernel shows what is printed."""
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"
