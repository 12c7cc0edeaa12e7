"""Questions turned into rows and numbers."""

from howsmooth.study.fit import GrowthFit, Interval, fit_growth
from howsmooth.study.jobs import EstimateRow, Job, Row, grouped, rare, row_of, task
from howsmooth.study.lengths import Growth, growth
from howsmooth.study.question import Question, Steps, questions
from howsmooth.study.radius import Radii, certified_radius, radii
from howsmooth.study.reader import alice, read_text
from howsmooth.study.swapped import Variants, variants
from howsmooth.study.words import WAYS, TokenAttack, attack_tokens

__all__ = [
    "WAYS",
    "EstimateRow",
    "Growth",
    "GrowthFit",
    "Interval",
    "Job",
    "Question",
    "Radii",
    "Row",
    "Steps",
    "TokenAttack",
    "Variants",
    "alice",
    "attack_tokens",
    "certified_radius",
    "fit_growth",
    "grouped",
    "growth",
    "questions",
    "radii",
    "rare",
    "read_text",
    "row_of",
    "task",
    "variants",
]
