"""A port that was chosen is still free for its server when that binds it."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from bridge.transport.ports import held_port


def _bind(port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_a_held_port_is_refused_to_others_and_left_to_its_server() -> None:
    port = held_port()
    with pytest.raises(OSError, match="in use") as refused:
        _bind(port)
    assert refused.value.errno == errno.EADDRINUSE
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.create_server((address, port)), socket.create_connection(("127.0.0.1", port)):
            pass


def test_asyncio_servers_may_listen_there() -> None:
    async def listen() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", held_port())
        server.close()

    asyncio.run(listen())


def test_no_connection_and_no_other_choice_takes_a_held_port() -> None:
    held = {held_port() for _ in range(50)}
    assert len(held) == 50
    with socket.create_server(("127.0.0.1", 0), backlog=300) as server:
        others = [socket.create_connection(server.getsockname()) for _ in range(200)]
        taken = {each.getsockname()[1] for each in others}
        for each in others:
            each.close()
    assert not held & taken
