"""Benchmarks: answers are compared first, times are taken side by side in one run."""
