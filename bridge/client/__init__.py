"""The trainer's side of a bridge."""
