"""What a sweep does: a list of tasks, each a named function and plain arguments, with a key that stays the same for ever."""

import hashlib
import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from howsmooth.errors import BadInputError


@final
@dataclass(frozen=True)
class Call:
    """A module-level function by name, `module:function`, and its arguments as canonical JSON."""

    function: str
    arguments: str = "{}"

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: Mapping[str, Any] | None = None) -> "Call":
        """The call by name; refused where another process could not find the function or read the arguments."""
        name = f"{getattr(function, '__module__', None)}:{getattr(function, '__qualname__', None)}"
        if name.startswith("__main__:") or not _found(name, function):
            raise BadInputError(f"expected a function that can be imported by name, got {name}; define it in a module")
        return cls(name, canonical(arguments or {}, name))

    def resolve(self) -> Callable[..., Any]:
        """The function itself."""
        return resolve(self.function)

    def kwargs(self) -> dict[str, Any]:
        """The arguments as every engine passes them: lists for tuples, text for keys."""
        return json.loads(self.arguments)


@final
@dataclass(frozen=True)
class Task:
    """One unit of work. The key is a hash of the function, its arguments and the setup of the workers."""

    call: Call
    setup: Call | None = None
    key: str = field(init=False)

    def __post_init__(self):
        parts = [self.call.function, self.call.arguments]
        parts += [self.setup.function, self.setup.arguments] if self.setup else []
        object.__setattr__(self, "key", hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32])


@final
@dataclass(frozen=True)
class Plan:
    """Tasks in order, without repetition, and what each worker builds once before its first one.

    A task returns a dictionary of plain values, one row, or a list of them. With a setup, what it returns, a loaded model
    say, is the first argument of every task.
    """

    tasks: tuple[Task, ...]
    setup: Call | None = None

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        arguments: Iterable[Mapping[str, Any]],
        *,
        setup: Callable[..., Any] | None = None,
        setup_arguments: Mapping[str, Any] | None = None,
    ) -> "Plan":
        """One function over many arguments; repeated arguments count once.

        >>> import math
        >>> plan = Plan.of(math.comb, [{"n": 4, "k": 2}, {"k": 2, "n": 4}])
        >>> len(plan.tasks), plan.tasks[0].key
        (1, '28f89be94f0cf2627eb203c152e847da')
        """
        prepare = None if setup is None else Call.of(setup, setup_arguments)
        calls = dict.fromkeys(Call.of(function, a) for a in arguments)
        return cls(tuple(Task(call, prepare) for call in calls), prepare)

    def __add__(self, other: "Plan") -> "Plan":
        """The tasks of both; their workers must be set up alike."""
        if self.setup != other.setup:
            raise BadInputError("expected plans with one setup, got two; run them one after the other")
        return Plan(tuple(dict.fromkeys(self.tasks + other.tasks)), self.setup)


def canonical(arguments: Mapping[str, Any], owner: str) -> str:
    """Arguments as JSON with sorted keys: equal arguments, equal text."""
    try:
        return json.dumps(dict(arguments), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadInputError(f"expected numbers, text and lists as arguments of {owner}, got {error}; pass such") from None


def resolve(name: str) -> Callable[..., Any]:
    """`module:function`, imported."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _found(name: str, function: Callable[..., Any]) -> bool:
    try:
        return resolve(name) is function
    except (ImportError, AttributeError, ValueError):
        return False
