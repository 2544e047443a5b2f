"""The tables that the index consists of."""
