"""The daemon's loop: receive messages, ingest them as one batch, answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import zmq

from bridge.daemon.authenticator import Authenticator
from bridge.daemon.checkpoints import Checkpoints
from bridge.daemon.counters import Counters
from bridge.daemon.fetch.answer import Fetching
from bridge.daemon.fetch.gather import Gather
from bridge.daemon.fetch.shm_writer import ShmWriter
from bridge.daemon.ingest import Ingest, Ingested
from bridge.daemon.memory.budget import Budget
from bridge.daemon.memory.mapped import MappedFiles
from bridge.daemon.memory.outbox import Outbox
from bridge.daemon.memory.shared_memory import ShmSegments
from bridge.daemon.memory.waiting import WaitingRequests
from bridge.daemon.monitor import Monitor
from bridge.daemon.queries import AdminQueries
from bridge.daemon.retention import Retention
from bridge.errors import CorruptMessage, TraceError
from bridge.index.recovery import recover
from bridge.observe.logs import Event, event
from bridge.observe.status import to_json
from bridge.store import Store
from bridge.transport.curve_keys import BridgeKeys
from bridge.transport.endpoints import EndpointInUse, Reach, checked_endpoint
from bridge.transport.loopback import bound_buffers
from bridge.transport.receiving import received
from bridge.wire import (
    MAX_FRAME_BYTES,
    Digests,
    Fetch,
    Gc,
    List,
    Message,
    Observe,
    ObserveReply,
    PageRows,
    Pin,
    Ping,
    Policy,
    Pong,
    RowsInShm,
    ShmPageRows,
    Stats,
)
from bridge.wire.codec import parsed
from bridge.wire.envelope import NO_SEQ, unseal
from bridge.wire.refusal import refusal

log = logging.getLogger(__name__)

_POLL_MS = 200
_WAITING_POLL_MS = 2
# Requests with large answers: they wait until the client has read the earlier answers.
LARGELY_ANSWERED = (Fetch, List, Digests, Stats, Observe)
_BATCH_MESSAGES = 256
# Waiting requests that the daemon answers before it receives new messages.
_BATCH_ANSWERS = 16
# TCP closes a connection whose peer reads nothing for so long; the peer reconnects by itself.
_TIMEOUT_MS = 60_000


class Daemon:
    """Serves one store at one endpoint.

    With ``keys`` it accepts only their clients. Without keys it listens on loopback only, unless
    ``insecure`` is set.

    Raises:
        InvalidEndpoint, EndpointInUse: the daemon cannot listen at the endpoint.
    """

    def __init__(
        self,
        endpoint: str,
        store: Store,
        policy: Policy | None = None,
        *,
        keys: BridgeKeys | None = None,
        insecure: bool = False,
    ) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        try:
            reach = Reach.LOOPBACK if keys is None and not insecure else Reach.ANYWHERE
            at = checked_endpoint(endpoint, reach)
            self._socket = self._context.socket(zmq.ROUTER)
            self._authenticator = (
                None if keys is None else Authenticator(self._context, self._socket, keys)
            )
            budget = Budget.of(store.usage().memory_limit)
            self._batch_bytes = budget.batch
            _listen(self._socket, at, budget.queued_messages)
            catalog, damaged_entries = recover(store)
        except BaseException:
            self._context.destroy()
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        for awaited in (
            self._socket,
            *(self._authenticator.sockets if self._authenticator else ()),
        ):
            self._poller.register(awaited, zmq.POLLIN)
        gather = Gather(store)
        self._outbox = Outbox(self._socket, budget)
        self._waiting = WaitingRequests(budget)
        self._counters = Counters()
        self._ingest = Ingest(store, catalog, self._counters, gather, self._outbox.reply)
        self._fetching = Fetching(catalog, gather)
        self._segments = ShmSegments(budget.shm)
        self._mapped = MappedFiles(budget.mapped)
        self._retention = Retention(store, catalog, policy or Policy())
        self._queries = AdminQueries(
            store,
            catalog,
            self._ingest,
            gather,
            self._retention,
            self._counters,
            damaged_entries,
            self._authenticator,
        )
        self._checkpoints = Checkpoints(store, catalog)
        store.reserve(catalog.nbytes())
        self.monitor = Monitor(self.endpoint, self._queries, catalog, self._ingest, self._counters)

    def run(self, stop_asked: Callable[[], bool]) -> None:
        """Serve until ``stop_asked()`` is true; the loop calls it several times per second."""
        while not stop_asked():
            has_news = self._poller.poll(_WAITING_POLL_MS if self._waiting else _POLL_MS)
            if has_news:
                self.run_once()
            self._answer_waiting()
            self.monitor.tick()
            self._retention.tick()
            self._segments.tick()
            self._mapped.tick(self._segments.nbytes)
            self._checkpoints.tick(quiet=not has_news)
        self._checkpoints.finish()

    def run_once(self) -> None:
        """Handle received messages, up to a limit, and commit them."""
        if self._authenticator is not None:
            self._authenticator.run_once()
        nbytes = 0
        for _ in range(_BATCH_MESSAGES):
            try:
                peer, *frames = received(self._socket, zmq.NOBLOCK)
            except zmq.Again:
                break
            self._handle(peer.bytes, [frame.buffer for frame in frames])
            nbytes += sum(len(frame) for frame in frames)
            if nbytes >= self._batch_bytes:
                break
        self._ingest.commit()

    def close(self) -> None:
        """Stop listening; engines send messages without an Ack again."""
        self._checkpoints.close()
        self._context.destroy(linger=1000)

    def _handle(self, peer: bytes, frames: list[memoryview]) -> None:
        seq = NO_SEQ
        try:
            envelope = unseal(frames)
            seq = envelope.seq  # known even if the daemon refuses the message
            message = parsed(envelope)
            if isinstance(message, RowsInShm):
                message = self._segments.rows(peer, message)
            if isinstance(message, Ingested):
                self._ingest.take(peer, message, seq)
            elif not isinstance(message, LARGELY_ANSWERED):
                self._outbox.reply(peer, self._reply(message), seq)
            elif peer in self._waiting or not self._room(peer):
                self._waiting.put(peer, bytes(frames[0]))
            else:
                self._answer(peer, message, seq)
        except TraceError as error:
            self._refuse(peer, error, seq)

    def _answer(self, peer: bytes, message: Message, seq: int) -> None:
        try:
            for reply in self._replies(peer, message, seq):
                if not self._outbox.send(peer, reply, seq):
                    return self._forget(peer)
        except TraceError as error:
            self._refuse(peer, error, seq)

    def _refuse(self, peer: bytes, error: TraceError, seq: int) -> None:
        self._counters.refuse(error)
        refused = event(Event.MESSAGE_REFUSED, code=type(error).__name__)
        log.warning("the daemon refuses a message: %s", error, extra=refused)
        self._outbox.reply(peer, refusal(error), seq)

    def _forget(self, peer: bytes) -> None:
        """Free the state of a client that has disconnected."""
        self._waiting.forget(peer)
        self._segments.forget(peer)

    def _answer_waiting(self) -> None:
        """Answer waiting requests of clients that have read enough, one per client in turn."""
        answered, before = 0, -1
        while before < answered < _BATCH_ANSWERS:
            before = answered
            for peer in self._waiting.peers():
                if self._room(peer):
                    question = unseal([memoryview(self._waiting.take(peer))])
                    self._answer(peer, parsed(question), question.seq)
                    answered += 1

    def _room(self, peer: bytes) -> int:
        return self._outbox.room(peer, len(self._waiting))

    def _replies(self, peer: bytes, message: Message, seq: int) -> Iterator[Message]:
        if not isinstance(message, Fetch):
            yield self._reply(message)
            return
        memory = self._segments.target(peer, message.buffer, seq)
        writer = None if memory is None else ShmWriter(memory)
        for reply in self._fetching.answer(message, writer, self._room(peer)):
            if isinstance(reply, PageRows | ShmPageRows):
                self._counters.send(reply)
            yield reply

    def _reply(self, message: Message) -> Message:
        match message:
            case List():
                return self._queries.list(message)
            case Digests():
                return self._queries.digests(message)
            case Stats():
                return self._queries.stats()
            case Observe():
                return ObserveReply(to_json(self.monitor.take()))
            case Ping():
                return Pong()
            case Pin():
                self._retention.pin(message)
                return Pong()
            case Gc():
                self._ingest.commit()  # so that it covers all messages before this request
                return self._retention.collect(message.policy)
        raise CorruptMessage(f"a {message.KIND} message is not for a daemon; send it to a client")


def _listen(socket: zmq.Socket[bytes], endpoint: str, queued_messages: int) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RCVHWM, queued_messages)
    socket.setsockopt(zmq.SNDHWM, 0)  # `Outbox` limits the bytes, and drops nothing
    socket.setsockopt(zmq.TCP_MAXRT, _TIMEOUT_MS)
    bound_buffers(socket, endpoint)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise EndpointInUse(
            f"cannot listen on {endpoint} ({error.strerror}); "
            "stop what uses it or choose another port with --endpoint"
        ) from error
