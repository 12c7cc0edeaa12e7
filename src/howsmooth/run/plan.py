"""What a sweep does: a list of tasks, each a named function and plain arguments, with a key that stays the same for ever."""

import functools
import hashlib
import json
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from howsmooth.errors import BadInputError


@final
@dataclass(frozen=True)
class Task:
    """One unit of work: a module-level function by name, `module:function`, and its arguments as JSON with sorted keys.

    setup: the task that every worker does once beforehand; what it returns, a loaded model say, is the function's first
    argument.
    """

    function: str
    arguments: str = "{}"
    setup: "Task | None" = None

    @classmethod
    def of(
        cls, function: Callable[..., Any], arguments: Mapping[str, Any] | None = None, setup: "Task | None" = None
    ) -> "Task":
        """The task by name; refused where another process could not find the function or read the arguments."""
        name = f"{getattr(function, '__module__', None)}:{getattr(function, '__qualname__', None)}"
        if name.startswith("__main__:") or not _importable(name, function):
            raise BadInputError(f"expected a function that can be imported by name, got {name}; define it in a module")
        try:
            text = json.dumps(dict(arguments or {}), sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BadInputError(f"expected numbers, text and lists as arguments of {name}, got {error}; pass such") from None
        return cls(name, text, setup)

    @functools.cached_property
    def key(self) -> str:
        """A hash of the function, its arguments and the setup."""
        parts = [self.function, self.arguments]
        parts += [self.setup.function, self.setup.arguments] if self.setup else []
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def kwargs(self) -> dict[str, Any]:
        """The arguments as every engine passes them: lists for tuples, text for keys."""
        return json.loads(self.arguments)

    def call(self, *context: Any) -> Any:
        """Do it. context: what the setup returned, where there is one."""
        return pkgutil.resolve_name(self.function)(*context, **self.kwargs())


@final
@dataclass(frozen=True)
class Plan:
    """Tasks in order, without repetition, that share one setup.

    A task returns a dictionary of plain values, one row, or a list of them.

    Attributes:
        tasks: Each a function that can be imported by name, and plain arguments.
    """

    tasks: tuple[Task, ...]

    def __post_init__(self):
        if len({task.setup for task in self.tasks}) > 1:
            raise BadInputError("expected plans with one setup, got two; run them one after the other")

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
        prepare = None if setup is None else Task.of(setup, setup_arguments)
        return cls(tuple(dict.fromkeys(Task.of(function, a, prepare) for a in arguments)))

    @property
    def setup(self) -> Task | None:
        return self.tasks[0].setup if self.tasks else None

    def __add__(self, other: "Plan") -> "Plan":
        """The tasks of both; their setups must be alike."""
        return Plan(tuple(dict.fromkeys(self.tasks + other.tasks)))


def _importable(name: str, function: Callable[..., Any]) -> bool:
    try:
        return pkgutil.resolve_name(name) is function
    except (ImportError, AttributeError, ValueError):
        return False
