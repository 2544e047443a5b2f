"""What a training step tells about its guidance: counts, agreement, distance from the rollout."""
