"""Questions turned into rows and numbers."""

from howsmooth.study.fit import GrowthFit, fit_growth
from howsmooth.study.jobs import Row
from howsmooth.study.lengths import Growth, growth
from howsmooth.study.question import Question, questions
from howsmooth.study.radius import Radii, certified_radius, radii
from howsmooth.study.reader import alice, read_text
from howsmooth.study.swapped import Variants, variants
from howsmooth.study.words import WAYS, TokenAttack, attack_tokens

__all__ = [
    "WAYS",
    "Growth",
    "GrowthFit",
    "Question",
    "Radii",
    "Row",
    "TokenAttack",
    "Variants",
    "alice",
    "attack_tokens",
    "certified_radius",
    "fit_growth",
    "growth",
    "questions",
    "radii",
    "read_text",
    "variants",
]
