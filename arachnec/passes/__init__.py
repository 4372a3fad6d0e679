"""Floor 2: passes over the cascade IR, one file each."""
