"""How the daemon answers a Fetch: find rows, gather their bytes, join the ranks' shares."""
