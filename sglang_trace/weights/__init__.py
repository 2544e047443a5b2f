"""Which weights computed a row."""
