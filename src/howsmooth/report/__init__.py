"""Rows turned into a page a person can read."""

from howsmooth.report.assemble import Report, inspect
from howsmooth.report.data import Methods, ReportData
from howsmooth.report.figures import COLOURS, MARKERS, draw_figures, figure_style, plain_numbers
from howsmooth.report.page import write_page
from howsmooth.report.shell import asset, finite, whole_page

__all__ = [
    "COLOURS",
    "MARKERS",
    "Methods",
    "Report",
    "ReportData",
    "asset",
    "draw_figures",
    "figure_style",
    "finite",
    "inspect",
    "plain_numbers",
    "whole_page",
    "write_page",
]
