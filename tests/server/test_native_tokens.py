"""llama-server's endpoints for tokens and templates, `/props`, and what there is not."""

from __future__ import annotations

import pytest

from localkv.server.dialects.llama_server import piece_of
from support.server import RunningServer

TEXT = "This is a text with unicode 媽 and emoji 🤗"


def test_tokens_and_back(server: RunningServer):
    tokens = server.post("/tokenize", {"content": TEXT})[1]["tokens"]
    assert server.post("/detokenize", {"tokens": tokens})[1]["content"].strip() == TEXT
    mixed = server.post("/tokenize", {"content": [TEXT, tokens[0]]})[1]["tokens"]
    assert mixed == [*tokens, tokens[0]]


def test_pieces_are_text_or_bytes(server: RunningServer):
    pieces = server.post("/tokenize", {"content": TEXT, "with_pieces": True})[1]["tokens"]
    ids = server.post("/tokenize", {"content": TEXT})[1]["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    data = [
        piece.encode() if isinstance(piece, str) else bytes(piece)
        for piece in (one["piece"] for one in pieces)
    ]
    assert b"".join(data).decode().strip() == TEXT
    assert piece_of(b"\xc3") == [0xC3]


def test_specials_are_read_and_added_as_asked(server: RunningServer):
    props = server.get("/props")[1]
    end = props["eos_token"]

    def tokens(**options: bool) -> list[int]:
        return server.post("/tokenize", {"content": end, **options})[1]["tokens"]

    assert len(tokens()) == 1
    assert len(tokens(parse_special=False)) > 1
    added = server.post("/tokenize", {"content": "a", "add_special": True})[1]["tokens"]
    plain = server.post("/tokenize", {"content": "a"})[1]["tokens"]
    assert added[-len(plain) :] == plain


def test_a_conversation_as_the_model_reads_it(server: RunningServer):
    messages = [{"role": "user", "content": "Tell me of a dog."}]
    prompt = server.post("/apply-template", {"messages": messages})[1]["prompt"]
    closed = server.post("/apply-template", {"messages": messages, "add_generation_prompt": False})[
        1
    ]["prompt"]
    assert "Tell me of a dog." in closed
    assert prompt.startswith(closed)
    assert prompt != closed


def test_the_tokens_of_a_conversation_are_counted(server: RunningServer):
    body = {"messages": [{"role": "user", "content": "Tell me of a dog."}], "max_tokens": 1}
    counted = server.post("/v1/chat/completions/input_tokens", body)[1]["input_tokens"]
    answer = server.post("/v1/chat/completions", {**body, "verbose": True})[1]
    assert counted == answer["usage"]["prompt_tokens"]
    prompt = server.post("/apply-template", body)[1]["prompt"]
    assert answer["__verbose"]["prompt"] == prompt


def test_props(server: RunningServer):
    props = server.get("/props")[1]
    assert props["model_path"].endswith(".gguf")
    assert props["total_slots"] == 4
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert props["default_generation_settings"]["params"]["temperature"] == 0.8
    assert props["modalities"] == {"vision": False, "video": False, "audio": False}
    assert props["chat_template"]
    assert server.post("/props", {})[0] == 501


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/tokenize", 400),
        ("/detokenize", 400),
        ("/apply-template", 400),
        ("/v1/embeddings", 400),
        ("/rerank", 400),
        ("/infill", 400),
        ("/v1/images/generations", 501),
        ("/v1/audio/transcriptions", 501),
        ("/lora-adapters", 400),
        ("/nothing", 404),
    ],
)
def test_what_is_refused(server: RunningServer, path: str, status: int):
    got, answer = server.post(path, {"tokens": [10**9]})
    assert got == status
    assert answer["error"]["code"] == status
