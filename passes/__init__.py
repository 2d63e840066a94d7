"""Export, place, copy and lower models: all that knows torch."""
