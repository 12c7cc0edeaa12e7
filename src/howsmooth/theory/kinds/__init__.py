"""Bounds for kinds of attention other than plain softmax (docs/explanation/kinds.md)."""
