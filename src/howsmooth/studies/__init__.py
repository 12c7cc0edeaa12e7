"""Questions turned into rows."""
