"""Rows turned into a page a person can read."""

from howsmooth.report.assemble import Report, inspect

__all__ = ["Report", "inspect"]
