"""Which requests are recorded, and the names of their trajectories."""
