"""Bytes between processes: endpoints, sockets, CURVE keys, shared memory."""
