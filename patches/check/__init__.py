"""Prove that the hooks of a patched upstream are called and fit our code."""
