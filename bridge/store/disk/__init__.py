"""The disk tier: an LMDB file, its limits and its upkeep."""
