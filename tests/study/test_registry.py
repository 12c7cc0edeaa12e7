"""A question is one object that is found by itself; its rows are read by attribute: no room but study knows their columns."""

import ast
import types
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

import howsmooth
from howsmooth.errors import BadInputError
from howsmooth.study import Row, questions
from howsmooth.study.answers import ReportData
from howsmooth.study.jobs import row_of
from howsmooth.study.layers import LAYERS, LayerRow
from howsmooth.study.question import found_in
from problems import reports

SRC = Path(howsmooth.__file__).parent
ROOMS = ("report", "paper", "cli")
# mappings that are no rows: the environment, versions, what is picked of a chart, arguments, files of tensors and of examples
ALLOWED = {
    *("os.environ", "m.versions", "result.versions", "versions()", "panel.picked"),
    *("given", "options", "tensors", "reading"),
}


def subscripts(source: str) -> list[str]:
    """What is looked up by a literal string, with brackets or `get`; a type in quotes, `tuple["Figure", Any]`, is none."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Subscript(value=whole, slice=ast.Constant(value=str())):
                pass
            case ast.Call(func=ast.Attribute(value=whole, attr="get"), args=[ast.Constant(value=str()), *_]):
                pass
            case _:
                continue
        found += [ast.unparse(node)] if ast.unparse(whole) not in ALLOWED else []
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_but_study_knows_a_column_by_name(room: str):
    files = sorted((SRC / room).rglob("*.py"))
    assert files
    found = {path.name: subscripts(path.read_text("utf-8")) for path in files}
    assert {name: some for name, some in found.items() if some} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('row["value"]', 1),
        ('f(rows[0]["n"])', 1),
        ('row.get("n")', 1),
        ("row[name], rows[0], row.value", 0),
        ('os.environ["A"]', 0),
    ],
)
def test_checker_refuses_a_literal_key(source: str, count: int):
    assert len(subscripts(source)) == count


def test_every_question_is_found_once_with_a_type_of_row_of_its_own_module():
    assert {"layers", "growth", "bounds", "variants", "shuffled", "norms"} <= set(questions())
    for name, question in questions().items():
        assert question.name == name
        assert issubclass(question.row, Row)
        assert is_dataclass(question.row)
        assert question.section is None or question.section.place > 0
    places = [question.section.place for question in questions().values() if question.section]
    assert len(set(places)) == len(places)


def test_two_questions_of_one_name_are_refused():
    one, other = types.ModuleType("one"), types.ModuleType("other")
    vars(one)["A"], vars(other)["B"] = LAYERS, LAYERS
    assert found_in([one, other]) == {"layers": LAYERS}  # imported elsewhere
    vars(other)["B"] = replace(LAYERS, title="another")
    with pytest.raises(ValueError, match="one question 'layers', got two"):
        found_in([one, other])


def test_rows_go_to_dictionaries_and_back():
    for cells in (*reports.layers(1, 1, (8,)), *reports.held(1), *reports.near(1), *reports.variants(1)):
        row = row_of(cells)
        assert row is not None
        back = row.to_dict()
        assert {key: back[key] for key in cells} == cells
        assert row_of(back) == row
        with pytest.raises(AttributeError):
            row.layer = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_columns_that_only_some_rows_have_are_left_out():
    (cells,) = reports.layers(1, 1, (8,))
    row = LayerRow.of(cells)
    assert "shares" not in row.to_dict()
    assert replace(row, shares=[1.0]).to_dict()["shares"] == [1.0]
    assert [field.name for field in fields(row)][:3] == ["model", "layer", "map"]


def test_rows_without_a_column_are_refused_and_other_kinds_are_left_out():
    (cells,) = reports.layers(1, 1, (8,))
    with pytest.raises(BadInputError, match="expected 'radius' in every row"):
        ReportData([{k: v for k, v in cells.items() if k != "radius"}], reports.METHODS)
    assert row_of({"kind": "mine"}) is None
