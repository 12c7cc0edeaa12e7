"""Bounds over all inputs whose tokens are no longer than a radius."""
