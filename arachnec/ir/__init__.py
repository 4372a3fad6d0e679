"""Floor 1: the cascade IR. Imports no torch."""
