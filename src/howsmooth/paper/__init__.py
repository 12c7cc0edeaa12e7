"""The experiments of Castin, Ablin & Peyré, *How Smooth Is Attention?*, ICML 2024, measured again (docs/reproduction.md)."""
