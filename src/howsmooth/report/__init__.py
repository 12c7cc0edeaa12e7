"""Rows turned into a page a person can read."""

from howsmooth.report.assemble import Report, inspect
from howsmooth.report.figures import COLOURS, MARKERS, draw_figures, figure_style, plain_numbers
from howsmooth.report.page import write_page
from howsmooth.report.shell import asset, finite, whole_page
from howsmooth.study.answers import Methods, ReportData

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
