"""A micro-batch's records, from the bridge to the order of the model's tokens."""
