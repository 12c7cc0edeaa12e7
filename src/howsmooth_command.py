"""The command `howsmooth` from its first moment on: what it imports takes seconds, in which Ctrl-C must end it quietly."""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Import the command line, then run it."""
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell may have it ignored
    try:
        if heard:
            signal.signal(signal.SIGINT, _stop)
    except KeyboardInterrupt:
        _stop()
    from howsmooth.cli import main as start

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(start())


def _stop(*_: object) -> None:
    """End at once: nothing is open yet that would have to be closed."""
    with contextlib.suppress(OSError):
        os.write(2, b"howsmooth: stopped\n")
    os._exit(130)
