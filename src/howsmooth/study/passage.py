"""Where in the text? Each token shaded by its share of the direction that a layer stretches most."""

from howsmooth.study.answers import ReportData
from howsmooth.study.charts import Drawing, Option, Passage, Pick, Section
from howsmooth.study.layers import LayerRow
from howsmooth.study.question import Question


def figure(rows: list[LayerRow], data: ReportData) -> list[Drawing]:
    """The passage at every length, shaded by its shares."""
    lengths = [n for n in data.shares if n in data.texts]
    if not lengths:
        return []
    cells = [
        {"layer": layer, "n": n, "shares": [round(share, 4) for share in own]}
        for n in lengths
        for layer, own in data.shares[n].items()
    ]
    title = "Share of each token, layer {layer}, n = {n}"
    chart = Passage(name="token-shares", title=title, unit="by position", source="shares", rows=cells, y="shares")
    there = sorted({row["layer"] for row in cells})
    first = data.focus if data.focus in there else there[0]
    layer = Pick("text-layer", "Layer", "layer", tuple(Option(k, f"layer {k}") for k in there), first)
    length = Pick("text-length", "Length", "n", tuple(Option(n, f"n = {n}") for n in lengths), lengths[-1])
    return [Drawing((chart,), (layer, length))]


TEXT = Question(
    name="text",
    row=LayerRow,
    figure=figure,
    section=Section(
        id="text",
        name="Text",
        title="Where in the text",
        place=25,
        text="Each token is shaded by its share |v<sub>i</sub>|² of the unit direction v that the layer stretches most; the "
        "token with the largest share sets the scale.",
    ),
)
