"""Apply, revert and verify patches on an installed upstream."""
