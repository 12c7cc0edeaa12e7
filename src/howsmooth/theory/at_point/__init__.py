"""Upper bounds at one input."""
