"""Parameters that are dealt out over cells of ranks: held, gathered, summed and saved (docs/sharded_parameters.md)."""
