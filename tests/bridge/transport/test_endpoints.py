"""Whatever is given as an endpoint: it is dialled, or one sentence says how to write it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bridge.cli.app import app
from bridge.client.client import TraceClient
from bridge.errors import BridgeUnreachable
from bridge.producer.producer import RecordProducer
from bridge.transport.endpoints import DEFAULT_ENDPOINT, InvalidEndpoint, dialled_endpoint
from sglang_trace.launch_server import main as launch

WRONG = [
    "",
    "127.0.0.1:7707",
    "localhost:7707",
    "http://127.0.0.1:7707",
    "tcp:/127.0.0.1:7707",
    "tcp://127.0.0.1",
    "tcp://127.0.0.1:",
    "tcp://127.0.0.1:0",
    "tcp://127.0.0.1:*",
    "tcp://*:7707",
    "tcp://127.0.0.1:65536",
    "tcp://127.0.0.1:777777777777",
    "tcp://127.0.0.1:-1",
    "tcp://127.0.0.1:7707/",
    "tcp://127.0.0.1:77\x0007",
    "tcp://127.0.0.256:7707",
    "tcp://::1:7707",
    "tcp://[::1:7707",
    "tcp://[:::1]:7707",
    "tcp://eth0;127.0.0.1:7707",
    "tcp://ho st:7707",
    "tcp://",
    "TCP://127.0.0.1:7707",
    "ipc:///tmp/bridge",
    "inproc://bridge",
    "tcp://127.0.0.1:7707,",
    "tcp://127.0.0.1:7707,127.0.0.1:7708",
    "tcp://127.0.0.1:7707;tcp://127.0.0.1:7708",
]


@pytest.mark.parametrize("text", WRONG)
def test_every_command_refuses_what_is_no_endpoint_in_one_sentence(text: str) -> None:
    for command in (["inspect"], ["gc", "--keep", "1"], ["top", "--once"], ["top"]):
        result = CliRunner().invoke(app, [*command, "--endpoint", text])
        assert (result.exit_code, result.stdout) == (1, "")
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        assert "; " in line


@pytest.mark.parametrize("text", WRONG)
def test_clients_and_engines_refuse_it_too(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidEndpoint, match="; "):
        TraceClient(text)
    with pytest.raises(InvalidEndpoint, match="; "):
        RecordProducer(text)
    monkeypatch.setattr("sglang_trace.launch_server.verify_target", lambda _: None)
    assert launch(["--trace-capture", "--trace-bridge", text]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("127.0.0.1:7707", "tcp://127.0.0.1:7707"),
        ("http://node-3:7707/", "tcp://node-3:7707"),
        ("TCP://localhost:7707", "tcp://localhost:7707"),
        ("[::1]:7707", r"tcp://\[::1\]:7707"),
        ("localhost", DEFAULT_ENDPOINT),
        ("999.1.1.1:7707", DEFAULT_ENDPOINT),
    ],
)
def test_the_sentence_shows_how_to_write_it(text: str, meant: str) -> None:
    with pytest.raises(InvalidEndpoint, match=f"write it as .*{meant}"):
        dialled_endpoint(text)


@pytest.mark.parametrize(
    "text",
    [DEFAULT_ENDPOINT, "tcp://localhost:1", "tcp://[::1]:65535", "tcp://a-b.example_1.org:7707"],
)
def test_endpoints_are_taken_as_they_are(text: str) -> None:
    assert dialled_endpoint(text) == text
    TraceClient(text).close()


@given(st.text(max_size=30) | st.text(alphabet="tcp:/[]0123456789.*%a;@ ", max_size=30))
def test_any_text_is_refused_by_us_or_taken_by_zeromq(text: str) -> None:
    with suppress(InvalidEndpoint), TraceClient(text):
        pass


def test_a_host_that_nobody_knows_is_named() -> None:
    with (
        TraceClient("tcp://no-such-host.invalid:7707", timeout_s=0.2) as client,
        pytest.raises(BridgeUnreachable, match=r"no address is known for no-such-host\.invalid"),
    ):
        client.ping()


def test_a_path_without_a_store_is_called_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("missing", "there is no "),
        ("file", "is a file; give the directory"),
        ("empty", "holds no store; give the --dir"),
    ):
        result = CliRunner().invoke(app, ["inspect", "--dir", str(tmp_path / name)])
        assert result.exit_code == 1
        assert said in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert list((tmp_path / "empty").iterdir()) == []
