"""Names on a real server: samples, requests with one id at a time, inputs that are not ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import torch
from safetensors.torch import load_file

from bridge.client.client import TraceClient
from bridge.layout import Site
from examples.tiny_model import make_checkpoint
from tests.sglang_trace.live_server import LiveServer, serving, tokens_of
from tests.sglang_trace.reference_model import ReferenceModel
from tests.sglang_trace.server.test_server_capture import fetch_whole

FLAGS = (
    *("--trace-capture", "--trace-sites", "fc1,k,v,routes", "--trace-layers", "all"),
    *("--trace-bits", "4", "--max-total-tokens", "4096", "--sleep-on-idle"),
    "--disable-radix-cache",
)
PROMPT = list(range(20, 44))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(model, tmp_path_factory.mktemp("log") / "log", *FLAGS) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[TraceClient]:
    with server.client() as made:
        yield made


def names(client: TraceClient) -> set[str]:
    return {each.trajectory for each in client.list_trajectories()}


def test_every_sample_is_fetched_under_its_documented_name(
    server: LiveServer, client: TraceClient
) -> None:
    before = names(client)
    sampling = {"n": 2, "max_new_tokens": 4, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "rid": "grp#2", "sampling_params": sampling}
    replies = server.post("generate", body)
    assert [reply["meta_info"]["id"] for reply in replies] == ["grp/0#2", "grp/1#2"]
    for number, reply in enumerate(replies):
        tokens = tokens_of(reply, PROMPT)
        assert fetch_whole(client, f"grp/{number}").tokens.tolist() == tokens
    message = {"role": "user", "content": "hi"}
    chat = {"model": "m", "n": 2, "max_tokens": 3, "rid": "chat", "messages": [message]}
    server.post("v1/chat/completions", chat)
    for number in range(2):
        fetch_whole(client, f"chat/{number}")
    assert names(client) - before == {"grp/0", "grp/1", "chat/0", "chat/1"}, "no prefix request"


def test_ids_that_no_record_can_have_are_answered_with_a_sentence(server: LiveServer) -> None:
    url = f"http://127.0.0.1:{server.port}/generate"
    for rid, sentence in (("", "names no trajectory"), ("n" * 1025, "send a shorter rid")):
        answer = requests.post(url, json={"input_ids": PROMPT, "rid": rid}, timeout=60)
        assert answer.status_code == 400
        assert sentence in answer.text


def test_embeddings_are_answered_and_not_recorded(
    server: LiveServer, client: TraceClient, model: Path
) -> None:
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"].float()
    embeds = table[torch.tensor(PROMPT)].tolist()
    sampling = {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True}
    body = {"input_embeds": embeds, "rid": "embedded", "sampling_params": sampling}
    server.post("generate", body)
    server.generate("after-embeddings", PROMPT, 2)
    fetch_whole(client, "after-embeddings")
    assert "embedded" not in names(client)
    assert "Request 'embedded' is not recorded" in server.output()


def test_a_record_has_the_digest_of_the_weights_and_the_right_rows(
    server: LiveServer, client: TraceClient, model: Path
) -> None:
    reply = server.generate("digest", PROMPT, 5)
    tokens = tokens_of(reply, PROMPT)
    records = fetch_whole(client, "digest")
    assert records.tokens.tolist() == tokens
    assert [len(digest) for digest in records.weights] == [64]
    truth = ReferenceModel(model).run(tokens[:-1]).sites[Site.FC1, 0].codes_u8
    codes = records.layout.site(records.forward[:-1], Site.FC1, 0).low_codes()
    assert (codes == truth).float().mean() > 0.9


def test_a_name_used_again_after_an_update_has_no_row_of_the_old_weights(
    server: LiveServer, client: TraceClient, tmp_path: Path
) -> None:
    server.generate("again", PROMPT, 5)
    (old,) = fetch_whole(client, "again").weights
    newer = make_checkpoint(tmp_path / "newer", seed=7)
    # Under the label that the server has already.
    server.post("update_weights_from_disk", {"model_path": str(newer)})
    tokens = tokens_of(server.generate("again", PROMPT, 5), PROMPT)
    server.generate("after-again", PROMPT, 2)
    fetch_whole(client, "after-again")
    records = fetch_whole(client, "again")
    assert records.tokens.tolist() == tokens
    assert len(records.weights) == 1
    assert records.weights != (old,)
