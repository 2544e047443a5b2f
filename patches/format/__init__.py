"""Patches and series as files: parse, order, write."""
