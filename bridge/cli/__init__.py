"""The command line `python -m bridge`."""
