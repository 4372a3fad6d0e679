"""Parameters that are dealt out over cells of ranks: held, gathered, reduced and saved (docs/sharded_parameters.md)."""
