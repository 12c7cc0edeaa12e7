"""Questions turned into rows and numbers."""

from howsmooth.study.fit import GrowthFit, fit_growth
from howsmooth.study.lengths import Growth, growth
from howsmooth.study.radius import certified_radius
from howsmooth.study.reader import alice, read_text
from howsmooth.study.words import WAYS, TokenAttack, attack_tokens

__all__ = [
    "WAYS",
    "Growth",
    "GrowthFit",
    "TokenAttack",
    "alice",
    "attack_tokens",
    "certified_radius",
    "fit_growth",
    "growth",
    "read_text",
]
