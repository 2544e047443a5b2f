"""One guided forward: the micro-batch it belongs to and the inputs it gets."""
