"""What happens inside a worker, whichever engine runs it: build the state once, then one task after another."""

import json
import os
import time
import traceback
from typing import Any, final

from howsmooth.errors import HowSmoothError
from howsmooth.run.plan import Call

_NOTHING = object()


@final
class Worker:
    """The state of one worker and what it answers; errors become answers, never escape."""

    def __init__(self, setup: Call | None):
        self._setup, self._state = setup, _NOTHING

    def prepare(self) -> dict[str, Any]:
        """Build the state: `{"event": "ready"}`, or why it cannot be built."""
        try:
            if self._setup is not None:
                self._state = self._setup.resolve()(**self._setup.kwargs())
        except Exception as error:
            return {"event": "unprepared", "reason": reason(error), "refused": isinstance(error, HowSmoothError)}
        return {"event": "ready"}

    def perform(self, call: Call) -> dict[str, Any]:
        """One task: its value as JSON, or the reason why there is none and whether another try makes sense."""
        started = time.perf_counter()
        first = () if self._setup is None else (self._state,)
        try:
            value = call.resolve()(*first, **call.kwargs())
            answer = {"event": "done", "value": json.dumps(value, allow_nan=True), "reason": None, "refused": False}
        except Exception as error:
            # a refusal is about the input: it would come again anywhere
            refused = isinstance(error, HowSmoothError)
            answer = {"event": "failed", "value": None, "reason": reason(error), "refused": refused}
        return answer | {"seconds": time.perf_counter() - started}


def reason(error: BaseException) -> str:
    """An error in one line: the sentence of ours, or another's type, text and place."""
    if isinstance(error, HowSmoothError):
        return str(error)
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}"[:2000] + place
