"""Key files, and daemons of another process that let only their own clients in."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import zmq
import zmq.auth
from numpy.typing import NDArray
from typer.testing import CliRunner

from bridge.cli.app import app
from bridge.client.client import TraceClient
from bridge.daemon.authenticator import Authenticator
from bridge.daemon.spawn import READY
from bridge.errors import BridgeUnreachable
from bridge.layout import Part, RecordLayout
from bridge.producer.producer import RecordProducer
from bridge.transport.curve_keys import BridgeKeys, ClientKeys, InvalidKeys, make_keys
from bridge.wire import Stats, StatsReply, encode


class Tap:
    """A port that passes one connection on to another and keeps what is sent there."""

    def __init__(self, port: int) -> None:
        self.heard = b""
        self._server = socket.create_server(("127.0.0.1", 0))
        self._far = socket.create_connection(("127.0.0.1", port))
        self._threads: list[threading.Thread] = []
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"

    def __enter__(self) -> Tap:
        self._threads.append(threading.Thread(target=self._accept))
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        for thread in self._threads:
            thread.join(timeout=10)
        self._far.close()

    def _accept(self) -> None:
        near, _ = self._server.accept()
        with near:
            back = threading.Thread(target=self._pass, args=(self._far, near, False))
            back.start()
            self._pass(near, self._far, True)
            self._far.shutdown(socket.SHUT_RDWR)
            back.join()

    def _pass(self, source: socket.socket, sink: socket.socket, keep: bool) -> None:
        while chunk := source.recv(1 << 16):
            self.heard += chunk if keep else b""
            sink.sendall(chunk)


@pytest.fixture
def serve_process() -> Iterator[Callable[..., str]]:
    """serve_process(*options) -> endpoint of a daemon in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> str:
        command = [sys.executable, "-m", "bridge", "serve", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(READY)
        return line.removeprefix(READY).strip()

    yield start
    for process in started:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with the keys of a bridge and of the clients rollout and trainer."""
    make_keys(tmp_path / "keys", ["rollout", "trainer"])
    return tmp_path / "keys"


@pytest.fixture
def guarded(serve_process: Callable[..., str], keys: Path) -> str:
    """A daemon that every address of this machine reaches, with keys."""
    endpoint = serve_process("--endpoint", "tcp://0.0.0.0:0", "--keys", str(keys / "bridge.keys"))
    return endpoint.replace("0.0.0.0", "127.0.0.1")


def _stats(endpoint: str, keys: Path) -> StatsReply:
    with TraceClient(endpoint, keys=keys / "trainer.keys") as client:
        return client.stats()


def test_clients_with_keys_write_and_read_records(
    guarded: str,
    keys: Path,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
) -> None:
    payload = make_rows(Part.FORWARD, range(3))
    with RecordProducer(guarded, keys=keys / "rollout.keys") as producer:
        producer.register("e", layout)
        producer.send_rows(Part.FORWARD, range(3), payload, "v")
        producer.send_trajectory("t", 0, range(4), [0, 1, 2, -1], "finished")
    with TraceClient(guarded, keys=keys / "trainer.keys") as client:
        np.testing.assert_array_equal(client.fetch("t").forward[:3], payload)
    shown = CliRunner().invoke(
        app, ["inspect", "--endpoint", guarded, "--keys", str(keys / "trainer.keys"), "--json"]
    )
    assert '"trajectory": "t"' in shown.stdout
    assert _stats(guarded, keys).refused_peers == 0


@pytest.mark.parametrize("encrypted", [True, False])
def test_records_are_not_to_be_read_on_the_wire_with_keys_and_are_without(
    serve_process: Callable[..., str], keys: Path, layout: RecordLayout, encrypted: bool
) -> None:
    options = ["--keys", str(keys / "bridge.keys")] if encrypted else []
    endpoint = serve_process("--endpoint", "tcp://127.0.0.1:0", *options)
    secret = np.frombuffer(b"a record that nobody else reads!" * 64, dtype=np.uint8)
    payload = np.resize(secret, (3, layout.row_bytes(Part.FORWARD)))
    with (
        Tap(int(endpoint.rpartition(":")[2])) as tap,
        RecordProducer(tap.endpoint, keys=keys / "rollout.keys" if encrypted else None) as producer,
    ):
        producer.register("engine-name", layout)
        producer.send_rows(Part.FORWARD, range(3), payload, "v")
        producer.flush()
    assert len(tap.heard) > payload.nbytes
    assert (b"nobody else reads" in tap.heard) is not encrypted
    assert (b"engine-name" in tap.heard) is not encrypted


def _unknown(folder: Path, keys: Path) -> Path:
    """A key file for the same bridge whose client the bridge does not know."""
    (stranger, *_) = make_keys(folder / "other", ["stranger"])[1:]
    here, there = ClientKeys.load(keys / "trainer.keys"), ClientKeys.load(stranger)
    stranger.write_text(ClientKeys(there.own, here.server).text())
    return stranger


def _of_another_bridge(folder: Path, keys: Path) -> Path:
    return make_keys(folder / "other", ["trainer"])[1]


def _none(folder: Path, keys: Path) -> None:
    return None


@pytest.mark.parametrize(
    ("stranger", "remedy"),
    [
        (_unknown, r"it does not know the key in .*stranger\.keys: name the client"),
        (_of_another_bridge, r"it has another key than .*trainer\.keys says, or none: use"),
        (_none, r"it asks for a key: pass the key file"),
    ],
)
def test_a_stranger_gets_a_sentence_and_its_messages_are_never_parsed(
    guarded: str,
    keys: Path,
    tmp_path: Path,
    layout: RecordLayout,
    stranger: Callable[[Path, Path], Path | None],
    remedy: str,
) -> None:
    file = stranger(tmp_path, keys)
    with (
        TraceClient(guarded, keys=file, timeout_s=1.0) as client,
        pytest.raises(BridgeUnreachable, match=remedy),
    ):
        client.ping()
    with (
        closing(RecordProducer(guarded, keys=file, deadline_s=1.0, resend_after_s=0.4)) as producer,
        pytest.raises(BridgeUnreachable, match=remedy),
    ):
        producer.register("e", layout)
    stats = _stats(guarded, keys)
    assert stats.refused_peers >= 2
    assert (stats.refused, stats.messages, stats.engines) == (0, 0, 0)


def test_noise_without_a_key_is_not_even_refused_by_the_parser(guarded: str, keys: Path) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(guarded)
    for _ in range(10):
        socket.send_multipart([b"noise", b""])
    assert not socket.poll(500)
    context.destroy(linger=0)
    stats = _stats(guarded, keys)
    assert (stats.refused, stats.messages) == (0, 0)
    assert stats.refused_peers >= 1


def test_a_client_named_later_comes_in_after_a_restart(
    serve_process: Callable[..., str], keys: Path
) -> None:
    before = BridgeKeys.load(keys / "bridge.keys")
    (_, added) = make_keys(keys, ["evaluator"])
    after = BridgeKeys.load(keys / "bridge.keys")
    assert after.own == before.own
    assert after.clients.items() > before.clients.items()
    endpoint = serve_process("--endpoint", "tcp://127.0.0.1:0", "--keys", str(keys / "bridge.keys"))
    for file in (added, keys / "rollout.keys"):
        with TraceClient(endpoint, keys=file) as client:
            client.ping()


def test_a_key_file_for_a_bridge_without_keys_is_told(endpoint: str, keys: Path) -> None:
    with (
        TraceClient(endpoint, keys=keys / "trainer.keys", timeout_s=1.0) as client,
        pytest.raises(BridgeUnreachable, match=r"or none: use .* serve with --keys"),
    ):
        client.ping()


def test_a_bridge_that_is_not_there_is_to_be_started_with_keys(keys: Path) -> None:
    with (
        TraceClient("tcp://127.0.0.1:9", keys=keys / "trainer.keys", timeout_s=0.2) as client,
        pytest.raises(BridgeUnreachable, match=r"serve --endpoint tcp://127.* --keys DIR/bridge"),
    ):
        client.ping()


def test_nobody_comes_in_before_somebody_answers_who_may(keys: Path) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    authenticator = Authenticator(context, socket, BridgeKeys.load(keys / "bridge.keys"))
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    peer = context.socket(zmq.DEALER)
    ClientKeys.load(keys / "trainer.keys").secure(peer)
    peer.connect(f"tcp://127.0.0.1:{port}")
    peer.send_multipart(encode(Stats(), 0))
    assert authenticator.sockets[0].poll(30_000)  # ZeroMQ asks: the handshake has come this far
    assert not socket.poll(200)
    authenticator.run_once()
    assert socket.poll(30_000)
    context.destroy(linger=0)


# --- where it listens


def _error(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    return result.stderr


@pytest.mark.parametrize("address", ["0.0.0.0", "10.0.0.1", "*", "[::]"])
def test_beyond_loopback_keys_are_required(address: str) -> None:
    error = _error("serve", "--endpoint", f"tcp://{address}:0")
    assert "serve with --keys" in error
    assert "--insecure" in error


def test_insecure_must_be_typed(serve_process: Callable[..., str]) -> None:
    endpoint = serve_process("--endpoint", "tcp://0.0.0.0:0", "--insecure")
    with TraceClient(endpoint) as client:
        client.ping()


def test_keys_and_insecure_contradict_each_other(keys: Path) -> None:
    assert "contradict" in _error("serve", "--keys", str(keys / "bridge.keys"), "--insecure")


# --- the files


def test_key_files_are_the_owners_alone_and_zeromqs_own_tools_read_them(keys: Path) -> None:
    for file in keys.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600
        load = BridgeKeys.load if file.name == "bridge.keys" else ClientKeys.load
        own = load(file).own
        assert zmq.auth.load_certificate(file) == (own.public.encode(), own.secret.encode())
    assert sorted(file.name for file in keys.iterdir()) == [
        "bridge.keys",
        "rollout.keys",
        "trainer.keys",
    ]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o611])
def test_a_file_open_to_others_is_refused(keys: Path, mode: int) -> None:
    (keys / "bridge.keys").chmod(mode)
    with pytest.raises(InvalidKeys, match=r"chmod 600 .*bridge\.keys"):
        BridgeKeys.load(keys / "bridge.keys")


def _corruptions(text: str) -> dict[str, str]:
    public = text.split('"')[1]
    return {
        "is not a key file": "\x00" + text,
        "is not a CURVE key": text.replace(public, public[:-1]),
        "are no pair": text.replace(public, zmq.curve_keypair()[0].decode()),
        r"has no \[curve\] pair": text.replace("[curve]", "[curves]"),
        "names no bridge": text.replace("[bridge]", "[bridges]"),
        "server-key in": text.replace("server-key", "key"),
    }


@pytest.mark.parametrize("why", list(_corruptions('"k"')))
def test_a_file_that_is_no_key_file_is_refused_with_the_reason(keys: Path, why: str) -> None:
    file = keys / "trainer.keys"
    file.write_text(_corruptions(file.read_text())[why])
    with pytest.raises(InvalidKeys, match=why):
        ClientKeys.load(file)


def test_the_wrong_sides_file_and_a_missing_one_are_refused(keys: Path) -> None:
    with pytest.raises(InvalidKeys, match="names no bridge"):
        TraceClient("tcp://127.0.0.1:9", keys=keys / "bridge.keys")
    assert "names no clients" in _error("serve", "--keys", str(keys / "trainer.keys"))
    assert "cannot be read" in _error("serve", "--keys", str(keys / "nowhere.keys"))


@pytest.mark.parametrize("name", ["", "a b", "bridge", "../x", 'a"', "é", "x" * 65])
def test_names_that_are_no_names_are_refused(tmp_path: Path, name: str) -> None:
    assert "cannot name a client" in _error("keys", str(tmp_path), name)
    assert not list(tmp_path.iterdir())


def test_a_clients_key_is_not_replaced_by_accident(keys: Path) -> None:
    before = (keys / "bridge.keys").read_text()
    assert "exists already" in _error("keys", str(keys), "new", "trainer")
    assert (keys / "bridge.keys").read_text() == before
