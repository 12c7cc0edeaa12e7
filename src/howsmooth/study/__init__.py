"""Questions turned into rows and numbers."""

from howsmooth.study.lengths import Growth, growth

__all__ = ["Growth", "growth"]
