"""Move a series to a new upstream release."""
