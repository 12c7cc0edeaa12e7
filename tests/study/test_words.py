"""Words: edits keep what must be kept, scores are what the model says, and guided edits beat random ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.models import Model, Window
from howsmooth.study import attack_tokens

ALICE = Path(hs.__file__).parent / "data" / "alice.txt"


@pytest.fixture(scope="module")
def model() -> Model:
    return hs.load("demo", device="cpu")


@pytest.fixture(scope="module")
def windows(model) -> tuple[Window, ...]:
    return model.text(ALICE.read_text("utf-8")[2000:60000]).windows(14, 4, seed=0)


def output(model: Model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model.module(input_ids=torch.tensor([ids])).last_hidden_state[0]


@pytest.mark.slow
def test_scores_are_what_the_model_says(model, windows):
    window = windows[0]
    base = output(model, window.ids)
    for row in attack_tokens(model, window, words=1, scored=6):
        moved = output(model, row.ids)
        if row.way == "duplicate":
            at = row.changes[0].position
            assert row.ids[at] == row.ids[at + 1]
            moved = torch.cat([moved[: at + 1], moved[at + 2 :]])
            assert row.changes[0].inserted
        else:
            changed = [i for i, (a, b) in enumerate(zip(row.ids, window.ids, strict=True)) if a != b]
            assert changed == [c.position for c in row.changes]
            assert len(changed) == 1
            assert model.tokenizer.convert_ids_to_tokens(row.ids[changed[0]]) == row.changes[0].new
        assert row.score == pytest.approx(float((moved - base).norm() / base.norm()), rel=1e-4)
        assert row.ids[0] == window.ids[0]
        assert row.ids[-1] == window.ids[-1]


@pytest.mark.slow
def test_a_layer_of_its_own(model, windows):
    """The attention map's output, in the model, at the changed words."""
    row = attack_tokens(model, windows[1], layer=2, ways=["gradient"], scored=6)[0]
    before, after = (model.capture(ids=list(ids)).map(2, "attention") for ids in (windows[1].ids, row.ids))
    with torch.no_grad():
        a, b = before(before.start), after(after.start)
    assert row.score == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-3)


@pytest.mark.weekly
def test_guided_words_beat_random_ones(model, windows):
    rows = [attack_tokens(model, w, layer=3, ways=["gradient"], scored=16)[0] for w in windows]
    assert all(row.score > row.random_mean for row in rows)
    assert sum(row.wins for row in rows) >= 2


@pytest.mark.slow
def test_two_words_and_what_is_forbidden(model, windows):
    first = attack_tokens(model, windows[2], words=2, ways=["gradient"], scored=3)[0]
    assert 1 <= len(first.changes) <= 2
    banned = [c.new for c in first.changes]
    again = attack_tokens(model, windows[2], words=2, ways=["gradient"], scored=3, forbid=banned)[0]
    assert not {c.new for c in again.changes} & set(banned)
    for row in (first, again):
        assert all(c.new.isalpha() and not c.new.startswith("##") for c in row.changes)
        assert all(c.old.isalpha() for c in row.changes)


@pytest.mark.slow
def test_raising_the_constant(model, windows):
    row = attack_tokens(model, windows[3], layer=1, goal="constant", ways=["gradient"], scored=3)[0]
    before, after = (model.measure(ids=list(ids), layer=1, tol=1e-2).value for ids in (windows[3].ids, row.ids))
    assert row.score >= 1
    assert row.score == pytest.approx(after / before, rel=0.02)
    assert row.changes or "no substitution raised the constant" in row.note


@pytest.mark.slow
def test_refusals(model, windows):
    window = windows[0]
    everything = list({str(t) for t in model.tokenizer.get_vocab()})
    refused: list[tuple[dict[str, Any], str]] = [
        ({"forbid": everything}, "forbidden ones that leave none"),
        ({"ways": ["magic"]}, "ways among"),
        ({"words": 0}, "at least 1"),
        ({"map": "heads"}, "attention or block"),
        ({"goal": "chaos"}, "output or constant"),
        ({"goal": "constant"}, "expected a layer"),
        ({"layer": 17}, "layer from 0 to 5"),
    ]
    for options, sentence in refused:
        with pytest.raises(BadInputError, match=sentence):
            attack_tokens(model, window, **options)
    special = model.text("alice").window()
    none = Window(special.ids[:1] + special.ids[-1:], special.pieces[:1] + special.pieces[-1:])
    with pytest.raises(BadInputError, match="may be replaced"):
        attack_tokens(model, none)
    with pytest.raises(BadInputError, match="tokenizer"):
        attack_tokens(hs.load(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)), window)
    with pytest.raises(BadInputError, match="padding"):
        attack_tokens(model, Window(window.ids, window.pieces, (False,) * len(window)))
