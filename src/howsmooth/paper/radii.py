"""Certified radii by layer, beside what attacks reach."""

from pathlib import Path

from howsmooth.errors import BadInputError
from howsmooth.paper.drawing import new_figure, save_figure
from howsmooth.study import Radii

_LINES = (("certified", "certified", "#1b6ca8"), ("first_order", "first order", "#999999"), ("attacked", "attack", "#c1440e"))


def draw_radii(path: Path, radii: Radii) -> Path:
    """Certified radius, first-order radius and attack by layer, a line for every window."""
    found = radii.found()
    if not found:
        raise BadInputError("expected a radius or more to draw, got none; certify another layer")
    figure, axes = new_figure(5.2, 3.8)
    for window in sorted({w for w, _, _ in found}):
        own = [(k, r) for w, k, r in found if w == window]
        for name, said, colour in _LINES:
            values = [max(getattr(r, name), 1e-300) for _, r in own]
            label = said if window == found[0][0] else None
            axes.plot([k for k, _ in own], values, "o-", ms=3, lw=1.3, color=colour, label=label)
    axes.set(xlabel="layer", ylabel=f"radius per {found[0][2].per}", yscale="log")
    axes.set_xticks(sorted({k for _, k, _ in found}))
    axes.legend(fontsize=8)
    return save_figure(figure, path)
