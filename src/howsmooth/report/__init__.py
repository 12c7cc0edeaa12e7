"""Rows turned into a page a person can read."""

from howsmooth.report.assemble import Report, inspect
from howsmooth.report.figures import COLOURS, MARKERS
from howsmooth.report.figures import _plain_numbers as plain_numbers
from howsmooth.report.figures import _style as figure_style
from howsmooth.report.page import _asset as asset

__all__ = ["COLOURS", "MARKERS", "Report", "asset", "figure_style", "inspect", "plain_numbers"]
