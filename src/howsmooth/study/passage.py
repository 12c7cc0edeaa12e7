"""Where in the text? Each token shaded by its share of the direction that a layer stretches most."""

from howsmooth.study.answers import ReportData
from howsmooth.study.charts import Drawing, Own, Section
from howsmooth.study.layers import LayerRow
from howsmooth.study.question import Question


def figure(rows: list[LayerRow], data: ReportData) -> list[Drawing]:
    """The passage at every length, beside its shares."""
    chart = Own(name="text", title="Share of each token", source="texts", rows=data.passages)
    return [Drawing((chart,))] if data.passages else []


TEXT = Question(
    name="text",
    row=LayerRow,
    figure=figure,
    section=Section(
        id="text",
        name="Text",
        title="Where in the text",
        place=25,
        text="Each token is shaded by its share |v<sub>i</sub>|² of the unit direction v that the layer stretches "
        "most; the token "
        "with the largest share sets the scale.",
        below='<div id="text-chart"></div>\n<p class="note" id="text-note"></p>\n<p class="passage" id="text-body" '
        'dir="auto"></p>',
    ),
)
