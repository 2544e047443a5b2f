"""Fixed buffers on loopback, the kernel's own elsewhere."""

from __future__ import annotations

import pytest
import zmq

from bridge.transport.loopback import bound_buffers, is_loopback

LOCAL = ["tcp://127.0.0.1:9", "tcp://127.8.0.1:*", "tcp://[::1]:80", "tcp://localhost:1"]
OTHER = ["tcp://0.0.0.0:9", "tcp://10.0.0.1:9", "tcp://[2001:db8::1]:9", "tcp://trainer-7:9", "x"]


@pytest.mark.parametrize("endpoint", LOCAL)
def test_a_loopback_endpoint_is_known(endpoint: str) -> None:
    assert is_loopback(endpoint)


@pytest.mark.parametrize("endpoint", OTHER)
def test_any_other_endpoint_may_be_a_network(endpoint: str) -> None:
    assert not is_loopback(endpoint)


def test_only_sockets_of_one_machine_get_buffers_of_a_fixed_size() -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        untouched = socket.getsockopt(zmq.SNDBUF)
        bound_buffers(socket, OTHER[1])
        assert socket.getsockopt(zmq.SNDBUF) == untouched
        bound_buffers(socket, LOCAL[0])
        assert socket.getsockopt(zmq.SNDBUF) == socket.getsockopt(zmq.RCVBUF) == 1 << 20
