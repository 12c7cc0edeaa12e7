"""Keys that stay the same, and what cannot be planned."""

import math
import subprocess
import sys

import pytest

from howsmooth.errors import BadInputError
from howsmooth.run import Plan, Task
from problems import sweeps


def plan(*arguments, **setup):
    return Plan.of(sweeps.value, arguments, **setup)


def test_a_key_depends_on_the_arguments_and_not_on_their_order():
    one, two = plan({"i": 1, "pause": 0.5}), plan({"pause": 0.5, "i": 1})
    assert one.tasks[0].key == two.tasks[0].key
    keys = [t.key for t in plan({"i": 1}, {"i": 2}, {"i": 1, "pause": 0.0}).tasks]
    assert len(set(keys)) == 3


def test_a_key_depends_on_the_function_and_on_the_setup():
    keys = {
        plan({"i": 1}).tasks[0].key,
        Plan.of(sweeps.fussy, [{"i": 1}]).tasks[0].key,
        plan({"i": 1}, setup=sweeps.build, setup_arguments={"base": 1}).tasks[0].key,
        plan({"i": 1}, setup=sweeps.build, setup_arguments={"base": 2}).tasks[0].key,
    }
    assert len(keys) == 4


@pytest.mark.slow
def test_a_key_is_the_same_in_another_process():
    code = "import math; from howsmooth.run import Plan; print(Plan.of(math.comb, [{'n': 4, 'k': 2.5}]).tasks[0].key)"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True)
    assert done.stdout.strip() == Plan.of(math.comb, [{"k": 2.5, "n": 4}]).tasks[0].key


def test_repeated_tasks_count_once_and_plans_add_up():
    twice = plan({"i": 1}, {"i": 1}) + plan({"i": 1}, {"i": 2})
    assert [t.kwargs()["i"] for t in twice.tasks] == [1, 2]
    with pytest.raises(BadInputError, match="one setup"):
        _ = plan({"i": 1}) + plan({"i": 1}, setup=sweeps.build, setup_arguments={"base": 1})


def test_every_engine_sees_arguments_as_json_has_them():
    assert Task.of(sweeps.value, {"i": (1, 2)}).kwargs() == {"i": [1, 2]}


@pytest.mark.parametrize("argument", [float("nan"), object(), {1, 2}, b"bytes"], ids=["nan", "object", "set", "bytes"])
def test_arguments_that_are_not_json_are_refused(argument):
    with pytest.raises(BadInputError, match="pass such"):
        plan({"i": argument})


def test_functions_without_an_importable_name_are_refused():
    def inner() -> None: ...

    class Fake:
        __module__, __qualname__ = "math", "comb"

    for function in (inner, lambda: None, Fake()):
        with pytest.raises(BadInputError, match="in a module"):
            Plan.of(function, [{}])  # pyright: ignore[reportArgumentType]
