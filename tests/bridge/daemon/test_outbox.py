"""Answers to a peer that does not read them are bounded, and go on when it does."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from bridge.daemon.fetch.gather import CHUNK_BYTES
from bridge.daemon.memory.budget import Budget
from bridge.daemon.memory.outbox import Outbox
from bridge.layout import Part
from bridge.wire import PageRows, decode

_PIECE = PageRows(Part.KV, 0, np.ones(1, np.bool_), np.full((1, CHUNK_BYTES), 7, np.uint8))


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A ROUTER and a DEALER "p" that takes one message before it is asked for."""
    with zmq.Context() as context:
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        for socket in (router, dealer):
            socket.linger = 0
        dealer.setsockopt(zmq.ROUTING_ID, b"p")
        dealer.setsockopt(zmq.RCVHWM, 1)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"hello")
        router.recv_multipart()
        yield router, dealer
        router.close()
        dealer.close()


def test_a_peer_that_reads_nothing_has_no_room_for_ever_more_pages(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    router, dealer = sockets
    budget = Budget.of(1 << 30)
    outbox = Outbox(router, budget)
    sent = 0
    while outbox.room(b"p") >= CHUNK_BYTES:
        outbox.send(b"p", _PIECE, sent)
        sent += 1
        time.sleep(0.01)  # so that what the socket's buffers take has left the queue
        assert sent * CHUNK_BYTES < budget.share(1) + (64 << 20)
    assert outbox.room(b"another peer") >= CHUNK_BYTES
    for seq in range(sent):
        message, answered = decode(dealer.recv_multipart())
        assert answered == seq
        assert isinstance(message, PageRows)
        assert (message.rows == 7).all()
    end = time.monotonic() + 10
    while outbox.room(b"p") < CHUNK_BYTES:
        assert time.monotonic() < end
        time.sleep(0.01)
