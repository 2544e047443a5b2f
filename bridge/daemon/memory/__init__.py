"""How the daemon keeps its memory under the limit, whatever its clients do."""
