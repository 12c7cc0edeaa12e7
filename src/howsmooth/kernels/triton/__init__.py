"""Fused kernels for GPUs. The derivation is in README.md beside this file."""

from howsmooth.kernels.triton.fused import WIDEST_HEAD, Fused, interpreted

__all__ = ["WIDEST_HEAD", "Fused", "interpreted"]
