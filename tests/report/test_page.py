"""The page as text: its answer, its data, what it refuses to write."""

import base64
import json
import re
from html import unescape

import numpy as np
import pytest

from howsmooth.errors import BadInputError, ResultsError
from howsmooth.report import write_page
from howsmooth.report.answer import answer, findings, plain
from howsmooth.report.page import LARGEST, payload, render
from howsmooth.report.shell import embed
from howsmooth.study.charts import number
from howsmooth.study.heads import HeadRow
from howsmooth.study.layers import LayerRow
from howsmooth.study.token import sink_of
from problems import reports


def test_the_answer_names_the_layer_the_growth_and_the_ceiling():
    first, second, third = map(plain, answer(reports.full()))
    assert first.startswith("Layer 0 is the least smooth: at n = 512 tokens")
    assert "in the mean of 6 samples; in the smoothest, layer 1," in first
    assert re.search(
        r"From 8 to 512 tokens its constant grows about like n\^0\.\d\d \(95 % interval 0\.\d+ to 0\.\d+\)", second
    )
    assert second.endswith("but layer 0 jumps 2.99-fold between n = 128 and 136.")
    assert "at n = 512 theory certifies at most" in third
    assert "5 times what was measured there, and" in third
    assert "900 times, over all inputs" in third


def test_the_jump_is_found_in_words_with_the_head_that_carries_it():
    jump, note = map(plain, findings(reports.full()))
    assert "n = 128 to" in jump
    assert "8 more tokens multiply it by" in jump
    assert "One head carries it: head 2 goes from 3 to 12, while no other changes." in jump
    assert "The positions past 128 carry" in jump
    assert note == "Position embeddings past 128 were never tuned."


def test_a_sink_is_named_in_the_first_sentences_with_what_it_carries():
    rows = [r | {"value": r["n"] ** 0.5 * (1 + r["layer"])} for r in reports.layers(6, 1)]
    data = reports.report([*rows, *reports.held(6, sink=True)[1:4], *reports.held(6)[4:]])
    sentences = [plain(s) for s in answer(data)]
    assert len(sentences) == 4
    assert sentences[1] == (
        "The first token, “[CLS]”, is a sink: at n = 512 it carries 97 % of the worst direction in 3 of 6 layers (1–3) and "
        "draws 60 % of all attention there; they grow about like n^0.50, and one token that all others see alike gives n^0.50. "
        "With it held fixed, layer 3 falls from 17.4 to 0.871."
    )


@pytest.mark.parametrize(
    ("count", "layers", "named"), [(1, 6, False), (2, 6, True), (5, 32, False), (7, 32, True), (1, 1, True)]
)
def test_one_layer_is_no_sink_and_many_are(count, layers, named):
    data = reports.report(reports.layers(layers, 1, (8, 16)) + reports.held(layers, 16, sink=True)[:count])
    assert (sink_of(data) is not None) == named
    assert len(answer(data)) == 3 + named


def test_a_leading_token_that_draws_little_attention_is_not_called_a_sink():
    rows = [r | {"received": 0.03} for r in reports.held(2, 16, sink=True)]
    said = plain(answer(reports.report(reports.layers(2, 1, (8, 16)) + rows))[1])
    assert said.startswith("The first token, “[CLS]”, stands out: at n = 16 it carries 97 % of")


def test_the_words_of_a_token_are_no_marks():
    rows = [r | {"word": " **a**^2\n" + "x" * 99, "token": 4} for r in reports.held(2, 16, sink=True)]
    said = answer(reports.report(reports.layers(2, 1, (8, 16)) + rows))[1]
    assert said.count("**") == 2
    assert re.search(r"\^\d", said.split("”")[0]) is None
    assert plain(said).startswith("Token 5, “*\u2060*a*\u2060*^\u20602 xxx")
    assert "x…”" in said


def test_kinds_are_told_by_their_least_and_largest_over_softmax():
    text = unescape(render(reports.full()))
    assert (
        "At n = 128 and equal entropy cosine has the smallest L, 0.5 times softmax's, and softmax the largest, 1 times;" in text
    )
    assert len(payload(reports.full())["variants"]) == 4 * 4 * 4
    assert "equal entropy" not in render(reports.report(reports.layers(1, 1)))


def test_the_picture_comes_back_from_its_codes():
    known = reports.influence(20)[0]
    (picture,) = payload(reports.report([*reports.layers(1, 1, (20,)), known]))["influence"]
    codes = np.frombuffer(base64.b64decode(picture["codes"]), "<u2").reshape(20, 20).astype(float)
    back = picture["low"] * (picture["high"] / picture["low"]) ** ((codes - 1) / 65534)
    np.testing.assert_allclose(np.where(codes > 0, back, 0), known["norms"], rtol=1e-3)
    for norms in ([[0.0, 0.0], [0.0, 0.0]], [[1.0, float("nan")], [float("inf"), 0.0]], [[3.0]]):
        rows = [*reports.layers(1, 1, (len(norms),)), known | {"n": len(norms), "norms": norms}]
        assert "NaN" not in embed(payload(reports.report(rows)))


def test_what_is_set_beside_a_measurement_is_said_in_a_sentence():
    text = render(reports.full())
    assert re.search(r"in layer 1: its block is (4[7-9]|5[0-3])(\.\d)? times smoother than its attention", text)
    assert "with token 1 held fixed L is 1.25 times smaller" in text
    assert "Every number is exact to rounding." in text
    assert "Within r = 0.001 no layer's L is more than 2 times that at the text (layer 0, where 1 times is attained)." in (
        text.replace("&#x27;", "'")
    )
    assert "moves by more than 10 % of its length" in text
    assert "The smallest certified radius is 0.001 of a token's length, in layer 0, and an attack needs 0.01." in (
        text.replace("&#x27;", "'")
    )
    none = [r | {"upper_ends": [None] * 4} for r in reports.near()]
    assert "Nothing is certified within r = 0.001." in render(reports.full(None, none))
    estimated = reports.full(None, reports.influence(accuracy=0.25))
    assert "typically within 25 %" in render(estimated)


def test_without_a_jump_nothing_is_said_of_one():
    data = reports.report([row for row in reports.layers() if row["layer"]])
    assert findings(data) == []
    assert "jump" not in plain(answer(data)[1])
    assert "not known" in plain(answer(data)[2])


def test_one_length_says_that_growth_is_unknown():
    data = reports.report(reports.layers(1, 1, (8,)))
    assert "Only one length" in plain(answer(data)[1])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (2.951, "2.95"), (291.3, "291"), (84914.0, "84\u202f900"), (2.5e7, "2.5·10^7"), (2e-5, "2.0·10^-5")],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_embedded_json_comes_back_and_cannot_close_its_block():
    value = {"words": list(reports.HOSTILE), "number": 1 / 3, "none": float("inf")}
    text = embed(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert text.isascii()
    back = json.loads(text)
    assert back["words"] == list(reports.HOSTILE)
    assert back["none"] is None


def test_the_only_script_tags_are_the_two_of_the_page():
    text = render(reports.harmful())
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    assert "<img" not in text


def test_confidence_is_never_rounded_up_to_certainty():
    rows = [row | {"confidence": 1 - 1e-9} for row in reports.layers(1, 1, (8,))]
    block = payload(reports.report(rows))["rows"]
    assert json.loads(embed(block))["rows"][0][block["names"].index("confidence")] == "0.999999999"


def test_nothing_in_the_page_asks_for_the_network():
    text = render(reports.full())
    assert not re.findall(r"""(?:src|href)=["']?(?!#)\w+:?//""", text)
    assert "default-src 'none'" in text
    assert "@import" not in text


def test_a_large_report_stays_under_the_limit(tmp_path):
    """48 layers, 20 lengths, 8 samples, 25 heads, a passage of 2048 tokens."""
    words = tuple(f"word{i}" for i in range(2048))
    measured = reports.with_shares(reports.layers(48, 8, (*range(8, 160, 8), 2048)), (2048,))
    data = reports.report(measured + reports.heads(48, 25) + reports.bounds(48), texts={2048: reports.tokens(words)})
    page = write_page(data, tmp_path / "page")
    assert page.stat().st_size < LARGEST


def test_a_page_beyond_the_limit_is_refused_and_nothing_is_written(tmp_path):
    rows = reports.with_shares(reports.layers(1, 1, (1,)), (1,))
    data = reports.report(rows, texts={1: reports.tokens(("x" * LARGEST,))})
    with pytest.raises(BadInputError, match="at most 6 MB"):
        write_page(data, tmp_path / "page")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_folder_is_refused():
    with pytest.raises(BadInputError, match="expected a folder for the report, got None"):
        write_page(reports.report(reports.layers(1, 1, (1,))), None)  # pyright: ignore[reportArgumentType]


def test_a_folder_that_holds_something_is_left_alone_unless_forced(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(BadInputError, match="--force"):
        write_page(reports.full(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    page = write_page(reports.full(), tmp_path, force=True)
    assert {p.name for p in tmp_path.iterdir()} == {"mine.txt", "index.html"}
    assert page.read_text("utf-8").startswith("<!doctype html>")
    with pytest.raises(BadInputError, match="got the file"):
        write_page(reports.full(), tmp_path / "mine.txt")
    with pytest.raises(ResultsError, match="choose another"):
        write_page(reports.full(), "/dev/null/page")


def test_data_that_does_not_fit_is_refused():
    first, *_ = reports.layers()
    with pytest.raises(BadInputError, match="at least one measurement"):
        reports.report([])
    with pytest.raises(BadInputError, match="finite constants"):
        reports.report([first | {"value": float("nan")}])
    with pytest.raises(BadInputError, match="a share for each of 2 tokens"):
        reports.report([first | {"n": 2, "shares": [1.0]}], texts={2: reports.tokens(("a", "b"))})
    for key in ("kind", "value", "radius"):
        with pytest.raises(BadInputError, match=f"'{key}' in every row"):
            reports.report([first, {k: v for k, v in first.items() if k != key}])


def test_a_layer_that_is_zero_has_a_summary_but_no_fit():
    data = reports.report(reports.zeros())
    assert [level.mean for level in data.summary] == [0.0, 0.0]
    assert data.fits == {}
    assert "Layer 0" in render(data)
    assert "positive constant" in plain(answer(data)[1])


def test_rows_come_in_order_and_other_kinds_are_left_out():
    rows = reports.layers(2, 2, (8, 16))
    data = reports.report([*rows[::-1], {"kind": "mine", "value": 1.0}])
    assert [row.place for row in data.of(LayerRow)] == [(row["layer"], row["n"], row["sample"]) for row in rows]
    assert [row.value for row in data.of(LayerRow)] == [row["value"] for row in rows]
    assert len(data.rows) == len(rows)
    assert data.of(HeadRow) == []
