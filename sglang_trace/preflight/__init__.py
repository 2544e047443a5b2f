"""What is checked before a server starts to capture."""
