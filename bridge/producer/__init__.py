"""The rollout engine's side of a bridge."""
