"""Questions turned into rows and numbers."""

from howsmooth.study.fit import GrowthFit, fit_growth
from howsmooth.study.lengths import Growth, growth
from howsmooth.study.radius import Radii, certified_radius, radii
from howsmooth.study.reader import alice, read_text
from howsmooth.study.swapped import Variants, variants
from howsmooth.study.words import WAYS, TokenAttack, attack_tokens

__all__ = [
    "WAYS",
    "Growth",
    "GrowthFit",
    "Radii",
    "TokenAttack",
    "Variants",
    "alice",
    "attack_tokens",
    "certified_radius",
    "fit_growth",
    "growth",
    "radii",
    "read_text",
    "variants",
]
