"""The page as text: its answer, its data, what it refuses to write."""

import base64
import json
import re
import zlib
from html import unescape

import numpy as np
import pytest

from howsmooth.errors import BadInputError, ResultsError
from howsmooth.report import write_page
from howsmooth.report.answer import answer, findings, plain
from howsmooth.report.page import LARGEST, packed, payload, render
from howsmooth.report.shell import embed
from howsmooth.study.advice import advice
from howsmooth.study.charts import coded, number
from howsmooth.study.heads import HeadRow
from howsmooth.study.layers import LayerRow
from howsmooth.study.token import FrozenRow
from problems import reports
from problems.desks import records


def test_the_verdict_says_which_layer_how_bad_why_and_what_to_do():
    which, bad, why, do = map(plain, answer(reports.full()))
    assert re.fullmatch(
        r"Layer 0 amplifies most: 2[01]\.\d×\. A small change of what enters its attention can come out 2[01]\.\d times as "
        r"large "
        r"\(at n = 512 tokens, the mean of 6 samples; in layer 1, the least, 10\.\d times\)\.",
        which,
    )
    assert re.match(
        r"That is (9\.\d+|10|10\.\d) times what it would be if the layer only averaged its tokens \(2\.0\d\)\.", bad
    )
    assert bad.endswith(
        "A change of 1 % of the input, in the worst direction, can become 2 % of the output; "
        "a random change of 1 % becomes about 0.2 %, since the worst direction is no noise."
    )
    assert why.startswith("Why: Head 2 alone has L = 12 at n = 136, the next head 5. From 8 to 512 tokens L grows")
    assert why.endswith("layer 0 jumps 2.99-fold between n = 128 and 136.")
    assert do.startswith("What to do: Check how the model was trained beyond 128 tokens")


def test_the_first_screen_answers_four_questions_of_who_knows_nothing_of_lipschitz():
    """The demo's own numbers, as `howsmooth demo` measures them."""
    which, bad, why, do = map(plain, answer(reports.demo()))
    assert which == (
        "Layer 4 amplifies most: 37.6×. A small change of what enters its attention can come out 37.6 times as large (at n "
        "= 512 "
        "tokens, the mean of 8 samples; in layer 0, the least, 13.2 times)."
    )
    assert bad == (
        "That is 8.9 times what it would be if the layer only averaged its tokens (4.22). A change of 1 % of the input, in "
        "the worst "
        "direction, can become 86 % of the output; a random change of 1 % becomes about 1.3 %, since the worst direction is "
        "no noise."
    )
    assert why == (
        "Why: Token 0, “[CLS]”, carries 98 % of the worst direction and draws 21 % of all attention; with it frozen L falls "
        "from 34.8 "
        "to 13.8 (first sample). From 8 to 512 tokens L grows like n^0.32 (95 % interval 0.32 to 0.33)."
    )
    assert do == (
        "What to do: If nothing can change token 0 (a fixed first token, a cached prefix), L with it frozen is the number that "
        "counts. Otherwise look at this token first. fp8 costs more than 1 % of the output in the mean: keep what "
        "enters layer 4 in bfloat16."
    )


def test_the_jump_is_found_in_words_with_the_head_that_carries_it():
    jump, *_, note = map(plain, findings(reports.full()))
    assert jump.startswith("Layer 0 jumps 2.99-fold between n = 128 and 136, from L = ")
    assert "One head carries it: head 2 goes from 3 to 12, while no other changes." in jump
    assert "The tokens from position 128 on carry" in jump
    assert note == "Position embeddings past 128 were never tuned."


def sink_rows(count: int, layers: int, **more) -> list[reports.Row]:
    """A report whose first layers are carried by token 0."""
    top = {"top_token": 0, "top_word": "[CLS]", "top_share": 0.97, "top_received": 0.6} | more
    return [r | top if r["layer"] < count else r for r in reports.layers(layers, 1, (8, 16))]


def test_one_token_that_carries_layers_is_one_piece_of_advice():
    data = reports.report([*sink_rows(2, 6), *reports.held(6, 16, sink=True)])
    (one, _) = advice(data)
    assert plain(one.found) == (
        "Token 0, “[CLS]”, is a sink: it carries 97 % of the worst direction in layers 0–1 and draws 60 % of all attention "
        "there. "
        f"With it frozen, L of layer 1 falls from {reports.value(1, 16):.3g} to {reports.value(1, 16) / 20:.3g}."
    )
    assert one.words == {0: "freeze token 0", 1: "freeze token 0"}
    assert one.do.startswith("If nothing can change token 0")


def test_a_leading_token_that_draws_little_attention_is_not_called_a_sink():
    (one, _) = advice(reports.report(sink_rows(1, 2, top_received=0.03)))
    assert plain(one.found).startswith("Token 0, “[CLS]”, stands out: it carries 97 % of")
    assert one.do.startswith("A change of this token moves the output most.")


def test_a_head_that_carries_a_layer_is_named_and_one_of_many_is_not():
    data = reports.report([*reports.layers(2, 1, (8, 16)), *reports.heads(2, 3, (16,))])
    assert "head" not in {one.kind for one in advice(data)}
    rows = [r | ({"value": 4.0} if (r["layer"], r["head"]) == (1, 2) else {"value": 0.5}) for r in reports.heads(2, 3, (16,))]
    (one,) = [one for one in advice(reports.report([*reports.layers(2, 1, (8, 16)), *rows])) if one.kind == "head"]
    assert "head 2 in layer 1. Alone, head 2 of layer 1 has L = 4 of the layer's" in plain(one.found)
    assert one.words == {1: "head 2"}
    assert "howsmooth.clip_" in one.do


def test_high_logits_and_rounding_are_told_with_their_numbers():
    rows = [r | ({"logits": 36.5, "high_heads": [2, 3]} if r["layer"] == 1 else {}) for r in reports.yardsticks(2, 16)]
    data = reports.report([*reports.layers(2, 1, (8, 16)), *rows])
    logits, rounding = advice(data)
    assert plain(logits.found) == "Logits above 30: layer 1 up to 36.5 (heads 2–3)."
    assert "quantity='logit'" in logits.do
    assert plain(rounding.found).startswith(
        "Rounding what enters layer 1 moves its output: float16 (0.049 %) about 0.0084 % in the mean, 0.15 % at worst; "
        "bfloat16 (0.39 %)"
    )
    assert rounding.do == "fp8 costs more than 1 % of the output in the mean: keep what enters layer 1 in bfloat16."


def test_layers_that_are_alike_are_said_to_be_and_nothing_has_to_be_done():
    rows = [r | {"value": 1.07 + 0.01 * r["layer"]} for r in reports.layers(8, 1, (8, 16))]
    yardsticks = [{**r, "averaging": 0.9} for r in reports.yardsticks(8, 16)]
    which, bad, _, do = map(plain, answer(reports.report(rows + yardsticks)))
    assert which.startswith("All layers are alike (1.07 to 1.14): ")
    assert "Layer 7 amplifies most." in which
    assert bad.startswith("That is close to averaging: 1.27 times what it would be")
    assert do.startswith("What to do: Nothing stands out, so nothing has to be done.")


def test_a_length_with_a_larger_constant_is_told_beside_the_longest():
    rows = [r | ({"value": 99.0} if (r["layer"], r["n"]) == (1, 8) else {}) for r in reports.layers(2, 1, (8, 16))]
    assert plain(answer(reports.report(rows))[0]).endswith("At n = 8 layer 1 reaches 99.")


def test_the_table_has_a_row_a_layer_and_words_that_lead_to_advice():
    rows = payload(reports.full())["profiles"]
    assert [row["layer"] for row in rows] == [0, 1, 2, 3]
    first, second, *_ = rows
    assert first["focus"]
    assert (first["advice"], first["link"]) == ("jump at 136", "#advice-jump")
    assert (second["advice"], second["link"]) == ("nothing stands out", None)
    assert second["times"] == pytest.approx(5, rel=0.1)
    assert first["bound"] == pytest.approx(5 * reports.value(0, 512))
    text = render(reports.full())
    assert 'id="advice-jump"' in text
    assert (
        "L, relative and × averaging are geometric means over 6 samples; gain, token, head and proved are of the first" in text
    )


def test_the_words_of_a_token_are_no_marks():
    rows = sink_rows(2, 2, top_word=" **a**^2\n" + "x" * 99, top_token=4)
    said = advice(reports.report(rows))[0].found
    assert said.count("**") == 2
    assert re.search(r"\^\d", said.split("”")[0]) is None
    assert plain(said).startswith("Token 4, “*\u2060*a*\u2060*^\u20602 xxx")
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
    steps = np.frombuffer(zlib.decompress(base64.b64decode(picture["codes"])), np.uint8).reshape(20, 20)
    codes = np.cumsum(steps, axis=0, dtype=np.uint8).astype(float)
    back = picture["low"] * (picture["high"] / picture["low"]) ** ((codes - 1) / 126)
    apart = (picture["high"] / picture["low"]) ** (0.5 / 126) - 1  # half a shade
    np.testing.assert_allclose(np.where(codes > 0, back, 0), known["norms"], rtol=1.01 * apart)
    for norms in ([[0.0, 0.0], [0.0, 0.0]], [[1.0, float("nan")], [float("inf"), 0.0]], [[3.0]]):
        rows = [*reports.layers(1, 1, (len(norms),)), known | {"n": len(norms), "norms": norms}]
        assert "NaN" not in embed(payload(reports.report(rows)))


def test_what_is_set_beside_a_measurement_is_said_in_a_sentence():
    text = render(reports.full())
    assert re.search(r"in layer 1: its block is (4[7-9]|5[0-3])(\.\d)? times smoother than its attention", text)
    assert "with token 0 frozen L is 1.25 times smaller" in text
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
    assert [one.kind for one in advice(data)] == ["rounding"]
    assert "jump" not in " ".join(answer(data))


def test_one_length_says_that_growth_is_unknown():
    data = reports.report(reports.layers(1, 1, (8,)))
    assert "Only one length" in plain(answer(data)[2])


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
    (row,) = json.loads(embed(payload(reports.report(rows))["measurements"]))
    assert row["confidence"] == "0.999999999"


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
    with pytest.raises(BadInputError, match="at least one measurement, got none of 2 that is finite"):
        reports.report([first | {"value": float("nan")}, first | {"value": None}])
    with pytest.raises(BadInputError, match="constants of at least 0"):
        reports.report([first | {"value": -1.0}])
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
    assert "positive constant" in plain(answer(data)[2])


def test_rows_come_in_order_and_other_kinds_are_left_out():
    rows = reports.layers(2, 2, (8, 16))
    data = reports.report([*rows[::-1], {"kind": "mine", "value": 1.0}])
    assert [row.place for row in data.of(LayerRow)] == [(row["layer"], row["n"], row["sample"]) for row in rows]
    assert [row.value for row in data.of(LayerRow)] == [row["value"] for row in rows]
    assert len(data.rows) == len(rows)
    assert data.of(HeadRow) == []


def test_records_come_back_from_their_columns():
    shown = packed(payload(reports.full()))
    back = {name: records(some) for name, some in shown.items() if isinstance(some, dict) and "columns" in some}
    assert {"bounds", "head", "growth", "measurements"} <= set(back)
    for name, rows in back.items():
        assert [{k: v for k, v in row.items() if v is not None} for row in rows] == [
            {k: v for k, v in row.items() if v is not None} for row in payload(reports.full())[name]
        ]


def test_rows_of_an_older_version_are_read():
    """It measured no yardsticks, wrote fewer columns, and asked a question that is gone."""
    rows = [row.to_dict() for row in reports.demo().rows if isinstance(row, LayerRow | FrozenRow)]
    new = {"top_token", "top_word", "top_share", "top_received"}
    old = [{k: v for k, v in row.items() if row["kind"] != "layer" or k not in new} for row in rows]
    data = reports.report([*old, {"kind": "gone", "layer": 0, "n": 8}])
    which, bad, why, do = map(plain, answer(data))
    assert which.startswith("Layer 4 amplifies most: 37.6×.")
    assert bad == "A change of 1 % of the input, in the worst direction, can become 86 % of the output."
    assert why.startswith("Why: No single token carries the worst direction, and no head stands out.")
    assert do.endswith(
        "float16, bfloat16 and fp8 cost more than 1 % of the output at worst: keep what enters layer 4 in float32."
    )
    assert {"link", "bound"} <= payload(data)["profiles"][0].keys()
    assert "Layer 4 amplifies most" in render(data)


def test_the_picture_of_512_tokens_is_small():
    """Its numbers are as random as those of attention are."""
    norms = np.random.default_rng(0).lognormal(0.0, 1.0, (512, 512))
    assert len(coded(norms.tolist())["codes"]) < 300_000
