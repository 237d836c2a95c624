"""One module per op: its contract (shapes, dtypes, tolerance), its argument struct and its wrapper."""
