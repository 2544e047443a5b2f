"""The loop: receive what has arrived, ingest it as one batch, answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import zmq

from bridge.daemon.authenticator import Authenticator
from bridge.daemon.checkpoints import Checkpoints
from bridge.daemon.counters import Counters
from bridge.daemon.fetch.answer import Fetching
from bridge.daemon.fetch.gather import Gather
from bridge.daemon.fetch.landing import Landing
from bridge.daemon.ingest import Ingest, Ingested
from bridge.daemon.memory.budget import Budget
from bridge.daemon.memory.mapped import MappedFiles
from bridge.daemon.memory.outbox import Outbox
from bridge.daemon.memory.shared_memory import Regions
from bridge.daemon.memory.waiting import WaitingQuestions
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
# Questions whose answers wait for a client to read those before.
LARGELY_ANSWERED = (Fetch, List, Digests, Stats, Observe)
_BATCH_MESSAGES = 256
# Waiting questions that are answered before what has arrived meanwhile is looked at.
_BATCH_ANSWERS = 16
# A peer that takes nothing for so long is disconnected; it comes back by itself when it reads.
_TIMEOUT_MS = 60_000


class Daemon:
    """Serves one store at one endpoint until told to stop.

    With ``keys`` only their clients come in; without, it listens on loopback alone unless
    ``insecure``.

    Raises:
        InvalidEndpoint, EndpointInUse: it cannot listen there.
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
            self._batch_bytes = budget.turn
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
        self._waiting = WaitingQuestions(budget)
        self._counters = Counters()
        self._ingest = Ingest(store, catalog, self._counters, gather, self._outbox.reply)
        self._fetching = Fetching(catalog, gather)
        self._regions = Regions(budget.lent)
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
        """Serve until ``stop_asked()``, looked at a few times a second."""
        while not stop_asked():
            has_news = self._poller.poll(_WAITING_POLL_MS if self._waiting else _POLL_MS)
            if has_news:
                self.run_once()
            self._answer_waiting()
            self.monitor.tick()
            self._retention.tick()
            self._regions.tick()
            self._mapped.tick(self._regions.nbytes)
            self._checkpoints.tick(quiet=not has_news)
        self._checkpoints.finish()

    def run_once(self) -> None:
        """Handle what has arrived, up to a bound, and commit it."""
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
        """Stop listening; what peers have not been told is held, they will send again."""
        self._checkpoints.close()
        self._context.destroy(linger=1000)

    def _handle(self, peer: bytes, frames: list[memoryview]) -> None:
        seq = NO_SEQ
        try:
            envelope = unseal(frames)
            seq = envelope.seq  # of what is intact and refused all the same
            message = parsed(envelope)
            if isinstance(message, RowsInShm):
                message = self._regions.rows(peer, message)
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
        log.warning("a message is refused: %s", error, extra=refused)
        self._outbox.reply(peer, refusal(error), seq)

    def _forget(self, peer: bytes) -> None:
        """Let go of a client that is gone."""
        self._waiting.forget(peer)
        self._regions.forget(peer)

    def _answer_waiting(self) -> None:
        """Answer the clients that have read enough of what they asked for before, one by one."""
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
        memory = self._regions.landing(peer, message.buffer, seq)
        landing = None if memory is None else Landing(memory)
        for reply in self._fetching.answer(message, landing, self._room(peer)):
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
                self._ingest.commit()  # what was told before this question is collected too
                return self._retention.collect(message.policy)
        raise CorruptMessage(f"a {message.KIND} message is not for a daemon; send it to a client")


def _listen(socket: zmq.Socket[bytes], endpoint: str, queued_messages: int) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RCVHWM, queued_messages)
    socket.setsockopt(zmq.SNDHWM, 0)  # `Outbox` bounds it, in bytes, and throws nothing away
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
