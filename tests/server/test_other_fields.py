"""Fields that promise something: each is kept, refused, or known to say nothing."""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path
from typing import Any, get_args
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec
import ollama
import pydantic
import pytest
from anthropic.resources.beta.messages import Messages as BetaMessages
from anthropic.resources.messages import Messages
from openai.resources.chat.completions import Completions as Chat
from openai.resources.completions import Completions
from openai.resources.responses import Responses

from localkv.loader.answer_tags import EFFORTS
from localkv.loader.chat_prompt import ChatPrompt
from localkv.server import limits
from localkv.server.chat_request import ChatBody, rendered
from localkv.server.dialects import anthropic as anthropic_api
from localkv.server.dialects import ollama as ollama_api
from localkv.server.dialects import openai_responses as openai
from localkv.server.dialects.llama_server import NativeBody
from localkv.server.dialects.ollama import ChatRequest, GenerateRequest
from localkv.server.dialects.openai import CompletionBody
from localkv.server.failures import RequestError
from localkv.server.json_body import ASKS_NOTHING, HARMLESS, NOTED, REFUSED, decoded
from localkv.server.request_record import RequestRecord
from support.front import front_of
from support.server import RunningServer

DOCS = Path(__file__).parent.parent.parent / "docs" / "server-apis.md"
USER = [{"role": "user", "content": "Hi"}]

OF_REQUEST = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


def parameters(function: Any) -> set[str]:
    """What a client's method takes that becomes a field."""
    return {*inspect.signature(function).parameters} - OF_REQUEST


OFFICIAL = {
    "chat": (ChatBody, parameters(Chat.create)),
    "completions": (CompletionBody, parameters(Completions.create)),
    "responses": (openai.ResponsesBody, parameters(Responses.create)),
    "messages": (anthropic_api.MessagesBody, parameters(Messages.create)),
    "beta messages": (anthropic_api.MessagesBody, parameters(BetaMessages.create)),
    "ollama chat": (ChatRequest, parameters(ollama.Client.chat)),
    "ollama generate": (GenerateRequest, parameters(ollama.Client.generate)),
}
BODIES: dict[type[msgspec.Struct], dict[str, Any]] = {
    ChatBody: {"messages": USER},
    CompletionBody: {"prompt": "a"},
    NativeBody: {"prompt": "a"},
    openai.ResponsesBody: {"input": "a"},
    anthropic_api.MessagesBody: {"messages": USER, "max_tokens": 1},
    ChatRequest: {"model": "tales"},
    GenerateRequest: {"model": "tales"},
}


@pytest.mark.parametrize("api", OFFICIAL)
def test_every_official_field_is_known(api: str) -> None:
    kind, fields = OFFICIAL[api]
    assert fields - {*kind.__struct_fields__, *REFUSED, *NOTED, *HARMLESS} == set()


def test_every_option_of_ollama_is_known() -> None:
    others = {*ollama.Options.model_fields} - {*ollama_api.Options.__struct_fields__}
    text = DOCS.read_text().replace("options.", "")
    assert [name for name in others if f"`{name}`" not in text] == []


def test_each_field_has_one_meaning_that_the_documentation_tells() -> None:
    tables = (REFUSED, NOTED, HARMLESS)
    assert len({*REFUSED, *NOTED, *HARMLESS}) == sum(map(len, tables))
    assert {*ASKS_NOTHING} <= {*REFUSED}
    text = DOCS.read_text()
    assert [name for table in tables for name in table if f"`{name}`" not in text] == []
    assert {*get_args(limits.Effort)} == {*EFFORTS}


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_promises_are_refused_in_every_dialect_that_does_not_keep_them(
    kind: type[msgspec.Struct], record: RequestRecord
) -> None:
    for name in REFUSED:
        if name in kind.__struct_fields__:
            continue
        for nothing in (None, False, [], {}, "", *ASKS_NOTHING.get(name, ())):
            decoded(json.dumps({**BODIES[kind], name: nothing}).encode(), kind)
        with pytest.raises(RequestError, match=f"^{name} is not supported") as error:
            decoded(json.dumps({**BODIES[kind], name: {"a": 1}}).encode(), kind)
        assert error.value.headers == {"x-should-retry": "false"}
    assert record.warnings == ()
    for name in NOTED:
        if name not in kind.__struct_fields__:
            decoded(json.dumps({**BODIES[kind], name: "a"}).encode(), kind)
            assert record.warnings[-1] == f"{name} has no effect: {NOTED[name]}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"store": True}, "store: this server stores no responses"),
        ({"previous_response_id": "a"}, "previous_response_id: this server stores no"),
        ({"prompt": {"id": "a"}}, "prompt: this server stores no"),
        ({"include": ["message.output_text.logprobs"]}, "logprobs of a response"),
        ({"top_logprobs": 2}, "logprobs of a response"),
        ({"truncation": "maybe"}, "truncation must be one of"),
    ],
)
def test_promises_of_responses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        openai.chat_body(
            decoded(json.dumps({"input": "a", **fields}).encode(), openai.ResponsesBody)
        )


def test_what_has_no_effect_on_a_response_is_named(record: RequestRecord) -> None:
    fields: dict[str, Any] = {"truncation": "auto", "text": {"verbosity": "low"}}
    openai.chat_body(decoded(json.dumps({"input": "a", **fields}).encode(), openai.ResponsesBody))
    assert [line.split()[0] for line in record.warnings] == ["verbosity", "truncation"]


# --- what the answer is


NATIVE, CHAT = "/completion", "/v1/chat/completions"
DIGITS = {"type": "string", "enum": ["1", "2"]}
CONSTRAINED: list[tuple[str, dict[str, Any]]] = [
    *(
        (path, fields)
        for path in (NATIVE, CHAT, "/v1/completions")
        for fields in (
            {"guided_json": DIGITS},
            {"guided_json": json.dumps(DIGITS)},
            {"guided_regex": '"[12]"'},
            {"guided_choice": ['"1"', '"2"']},
            {"guided_grammar": 'root ::= "\\"" [12] "\\""'},
            {"structured_outputs": {"json": DIGITS}},
            {"structured_outputs": {"regex": '"[12]"'}},
            {"structured_outputs": {"choice": ['"1"', '"2"']}},
            {"structured_outputs": {"grammar": 'root ::= "\\"" [12] "\\""'}},
        )
    ),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": DIGITS}}}),
    ("/v1/messages", {"output_format": {"type": "json_schema", "schema": DIGITS}}),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "n", "schema": DIGITS}}}),
    ("/api/chat", {"format": DIGITS}),
]


@pytest.mark.parametrize(("path", "fields"), CONSTRAINED)
def test_an_answer_is_what_was_promised(
    server: RunningServer, path: str, fields: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"messages": USER, "max_tokens": 20}
    if path in (NATIVE, "/v1/completions"):
        asked = {"prompt": "Once", "max_tokens": 20}
    elif path == "/v1/responses":
        asked = {"input": "Hi", "max_output_tokens": 20}
    elif path == "/api/chat":
        asked = {"messages": USER, "stream": False}
    status, answer = server.post(path, {"model": "tales", **asked, **fields})
    assert status == 200
    texts = json.dumps(answer)
    assert '\\"1\\"' in texts or '\\"2\\"' in texts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_json": {"enum": [1]}, "guided_regex": "a"}, "guided_json and guided_regex say"),
        ({"guided_regex": "("}, "regular expression"),
        ({"guided_choice": []}, "guided_choice must be a list"),
        ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structural_tag"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json must be"),
    ],
)
def test_promises_that_can_not_be_kept(
    server: RunningServer, fields: dict[str, Any], message: str
) -> None:
    status, answer = server.post(CHAT, {"messages": USER, **fields})
    assert status in (400, 501)
    assert message in answer["error"]["message"]


def test_choices_are_any_texts(server: RunningServer) -> None:
    texts = ['say "no"\n', "é\\\U0001f600", "a", "ab"]
    for text in texts:
        fields = {"guided_choice": [text], "max_tokens": 40}
        _, answer = server.post(CHAT, {"messages": USER, **fields})
        assert answer["choices"][0]["message"]["content"] == text


def test_a_parsed_message_of_anthropics_client(server: RunningServer) -> None:
    import anthropic

    class Found(pydantic.BaseModel):
        a: bool

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        message = client.messages.parse(
            model="tales",
            max_tokens=60,
            messages=[{"role": "user", "content": "Hi"}],
            output_format=Found,
        )
    assert isinstance(message.parsed_output, Found)


def test_formats_of_messages_that_are_none() -> None:
    schema = {"type": "json_schema", "schema": {"enum": [1]}}
    for fields, message in (
        ({"output_format": {"type": "text"}}, "output_format is no JSON schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format is no JSON"),
        (
            {"output_format": schema, "output_config": {"format": {**schema, "a": 1}}},
            "output_config.format and output_format differ",
        ),
    ):
        body = json.dumps({"messages": USER, "max_tokens": 1, **fields}).encode()
        with pytest.raises(RequestError, match=message):
            anthropic_api.chat_body(decoded(body, anthropic_api.MessagesBody))


# --- errors that would only come again


def test_clients_are_told_where_asking_again_is_in_vain(server: RunningServer) -> None:
    final = [status for status in range(400, 600) if RequestError(status, "a").headers]
    assert final == [500, 501, 504]
    asked = Request(f"{server.url}/v1/moderations", b"{}", {"content-type": "application/json"})
    with pytest.raises(HTTPError) as error:
        urlopen(asked, timeout=60)
    with error.value as answer:
        assert (answer.code, answer.headers["x-should-retry"]) == (501, "false")


# --- how much the model reasons


def test_the_effort_in_each_dialect() -> None:
    said = {"reasoning": {"effort": "low"}, "input": "a"}
    response = decoded(json.dumps(said).encode(), openai.ResponsesBody)
    assert openai.chat_body(response).reasoning.effort == "low"
    config = {"output_config": {"effort": "max"}, "messages": USER, "max_tokens": 1}
    message = decoded(json.dumps(config).encode(), anthropic_api.MessagesBody)
    assert anthropic_api.chat_body(message).reasoning_effort == "max"
    for think, effort, is_on in (
        ("high", "high", True),
        ("none", "none", False),
        (True, None, True),
        (False, None, False),
        (None, None, None),
    ):
        asked = ChatRequest(model="tales", think=think, messages=USER)
        chat = ollama_api.chat_body(asked, ollama_api.Options())
        assert (chat.reasoning_effort, chat.enable_thinking) == (effort, is_on)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, None, None)),
        ({"thinking": {"type": "disabled"}}, (False, None, None)),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, (True, 9, None)),
        ({"thinking": {"type": "adaptive"}, "reasoning_effort": "low"}, (True, None, "low")),
        ({"reasoning": {"effort": "none"}}, (None, None, "none")),
        ({"reasoning": {"enabled": False, "max_tokens": 5}}, (False, 5, None)),
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, (True, None, None)),
    ],
)
def test_reasoning_in_the_words_of_others(
    fields: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    asked = dict[str, Any]()

    class Told:
        """A front that notes what a conversation is rendered with."""

        settings = front_of().settings

        async def conversation(self, messages: Any, **options: Any) -> ChatPrompt:
            asked.update(options)
            return ChatPrompt([], "")

    body = decoded(json.dumps({"messages": USER, **fields}).encode(), ChatBody)
    asyncio.run(rendered(Told(), body))  # type: ignore[arg-type]
    names = ("enable_thinking", "reasoning_budget", "reasoning_effort")
    assert tuple(asked[name] for name in names) == expected


# --- numbers


def test_whole_numbers_may_be_floats() -> None:
    options = {"num_predict": 20.0, "seed": 7.0, "num_ctx": 4096.0, "temperature": 1}
    body = decoded(json.dumps({"model": "a", "options": options}).encode(), ChatRequest)
    assert body.options is not None
    assert (body.options.num_predict, body.options.seed) == (20, 7)
    assert decoded(b'{"prompt": "a", "n_predict": 3.0}', NativeBody).n_predict == 3
    for value in (20.5, 1e300):
        text = json.dumps({"prompt": "a", "n_predict": value}).encode()
        with pytest.raises(RequestError, match="n_predict must be a whole number"):
            decoded(text, NativeBody)


def test_a_larger_context_is_a_warning_unless_the_prompt_does_not_fit(
    server: RunningServer,
) -> None:
    options = {"num_ctx": 1 << 20, "num_predict": 1}
    asked = {"model": "tales", "messages": USER, "stream": False, "options": options}
    assert server.post("/api/chat", asked)[0] == 200
    long = [{"role": "user", "content": "word " * 4000}]
    status, answer = server.post("/api/chat", {**asked, "messages": long})
    assert status == 400
    assert "exceeds the available context size" in answer["error"]


def test_the_servers_own_effort_is_for_requests_that_say_nothing(tmp_path: Path) -> None:
    from localkv.server.prompts import PromptModel
    from support.server import SHIPPED_MODEL

    source = "{{ enable_thinking }} {{ reasoning_effort }} {{ messages[0].content }}"
    model = PromptModel(SHIPPED_MODEL, chat_template=source, reasoning_effort="none")
    for options, text in (
        ({}, "False  Hi"),
        ({"reasoning_effort": "low"}, "True low Hi"),
        ({"enable_thinking": True}, "True  Hi"),
        ({"template_kwargs": {"enable_thinking": True}}, "True  Hi"),
    ):
        assert model.conversation(USER, **options).text == text
    other = PromptModel(SHIPPED_MODEL, chat_template=source, reasoning_effort="high")
    assert other.conversation(USER).text == "True high Hi"
    assert other.conversation(USER, reasoning_effort="none").text == "False  Hi"
