"""Questions turned into rows and numbers."""
