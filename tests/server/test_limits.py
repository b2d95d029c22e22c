"""What a request may be: the table of limits, in every dialect."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec import inspect

from localkv.chat.engine import EngineOptions
from localkv.engine_process.texts import Facts, Submit
from localkv.sampling.params import SamplingParams
from localkv.server import front as front_module
from localkv.server import limits
from localkv.server.app import ENDPOINTS, described
from localkv.server.engine_client import TextClient
from localkv.server.failures import RequestError
from localkv.server.front import with_seed
from localkv.server.json_body import decoded, nesting
from localkv.server.request_record import Recorder
from support.attack.odd_fields import BODIES, odd_requests
from support.fake_engine import FACTS
from support.front import front_of, models_of
from support.server import RunningServer

KINDS: dict[str, type[msgspec.Struct]] = {
    path: endpoint.body_type
    for path, _, endpoint in ENDPOINTS
    if hasattr(endpoint, "body_type") and path in BODIES
}
"""The types of bodies, by path; other paths are other names."""
DRAWING = [path for path, body in BODIES.items() if re.search("max_|n_predict|stream", f"{body}")]
"""Paths that draw tokens."""
FREE = {"content", "prompt", "input", "instructions", "system", "suffix", "template", "description"}
"""Texts that only the size of a body limits."""
NUMBERS = (inspect.IntType, inspect.FloatType)
SIZED = (inspect.StrType, inspect.ListType, inspect.DictType)


class Place(NamedTuple):
    """A place in a body where a value of a type may be, and bodies with a value there."""

    path: str
    kind: inspect.Type
    around: Any

    @property
    def name(self) -> str:
        """The field that it belongs to."""
        return self.path.split(".")[-1].split("[")[0]

    def body(self, value: Any) -> dict[str, Any]:
        """The smallest body with the value there."""
        made: dict[str, Any] = self.around(value)
        return made


def places(
    kind: inspect.Type, path: str = "", around: Any = lambda value: value
) -> Iterator[Place]:
    """Every place in a body where something may be."""
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from places(one, path, around)
        return
    if path:
        yield Place(path, kind, around)
    if isinstance(kind, inspect.ListType):
        yield from places(kind.item_type, f"{path}[0]", lambda value: around([value]))
    elif isinstance(kind, inspect.StructType):
        needed = {f.encode_name: example(f.type) for f in kind.fields if f.required}
        for field in kind.fields:
            name = field.encode_name
            yield from places(
                field.type,
                f"{path}.{name}".lstrip("."),
                lambda value, name=name: around({**needed, name: value}),
            )


def example(kind: inspect.Type) -> Any:
    """A small value of a type."""
    match kind:
        case inspect.UnionType(types=types):
            return example(types[0])
        case inspect.IntType() | inspect.FloatType() | inspect.AnyType():
            return 1
        case inspect.StrType():
            return "a"
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.ListType(item_type=item, min_length=least):
            return [example(item)] * (least or 1)
        case inspect.StructType(fields=fields):
            return {f.encode_name: example(f.type) for f in fields if f.required}
        case inspect.DictType():
            return {}
    return None


def around_limit(kind: inspect.Type) -> tuple[list[Any], list[Any]]:
    """Values just inside the limits of a type, and values just outside."""
    match kind:
        case inspect.IntType(ge=int(least), le=int(most)):
            return [least, most], [least - 1, most + 1, 2**64, 10**400]
        case inspect.FloatType(ge=float(least), le=float(most)):
            beyond = max(1.0, abs(most))
            return [least, most], [least - beyond, most + beyond, 1e308, -1e308]
        case inspect.StrType(max_length=int(most)):
            return ["a" * most], ["a" * (most + 1)]
        case inspect.ListType(item_type=item, max_length=int(most)):
            one = example(item)
            return [[one] * most], [[one] * (most + 1)]
        case inspect.DictType(value_type=item, max_length=int(most)):
            several = {str(n): example(item) for n in range(most + 1)}
            return [dict(islice(several.items(), most))], [several]
    return [], []


ALL = [(path, place) for path, kind in KINDS.items() for place in places(inspect.type_info(kind))]


def test_every_number_list_and_text_has_a_limit():
    for path, (name, kind, _) in ALL:
        if isinstance(kind, NUMBERS):
            assert None not in (kind.ge, kind.le), (path, name)
        elif isinstance(kind, SIZED) and name.split(".")[-1] not in FREE and "[0]" not in name:
            assert kind.max_length is not None, (path, name)


@pytest.mark.parametrize("path", KINDS)
def test_an_error_names_the_field_and_what_it_may_be(path: str):
    for place in places(inspect.type_info(KINDS[path])):
        for value in around_limit(place.kind)[1]:
            with pytest.raises(RequestError) as error:
                decoded(json.dumps(place.body(value)).encode(), KINDS[path])
            message = error.value.message
            assert message.startswith(f"{place.path} must be "), message
            assert limits.described(place.kind).removeprefix("a ") in message, message
            assert error.value.status == 400
            assert len(message) < 400


@pytest.mark.parametrize("path", KINDS)
def test_what_is_just_inside_is_taken(path: str):
    for place in places(inspect.type_info(KINDS[path])):
        for value in around_limit(place.kind)[0]:
            decoded(json.dumps(place.body(value)).encode(), KINDS[path])


def test_the_api_description_has_the_ranges():
    schemas = json.dumps(described(ENDPOINTS, "tales")["components"]["schemas"])
    assert f'"minimum": 0, "maximum": {limits.MOST_LOGPROBS}' in schemas
    assert '"maxItems": 16' in schemas


def _posted(server: RunningServer, path: str, fields: dict[str, Any]) -> tuple[int, str]:
    body = {**BODIES[path], **fields}
    if "options" in fields:
        body["options"] = {**BODIES[path]["options"], **fields["options"]}
    status, answer = server.post(path, body)
    assert isinstance(answer, dict), answer
    return status, json.dumps(answer)


def _refusal_of_the_whole(fields: dict[str, Any]) -> str:
    """Why a body with these fields is refused before they are read; empty if it is not."""
    try:
        nesting(json.dumps(fields).encode())
    except RequestError as error:
        return error.message
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("path", KINDS)
def test_limits_hold_wherever_a_field_is(server: RunningServer, path: str):
    for place in places(inspect.type_info(KINDS[path])):
        inside, outside = around_limit(place.kind)
        for value in outside[:1]:
            status, text = _posted(server, path, place.body(value))
            named = _refusal_of_the_whole(place.body(value)) or place.path
            assert (status, named in text) == (400, True), (place.path, status, text)
        for value in inside:
            if len(str(value)) > 10_000 or place.name in ("n", "n_cmpl", "best_of"):
                continue
            status, text = _posted(server, path, place.body(value))
            assert status not in (500, 503), (place.path, text)
            assert status != 400 or f"{place.path} must be" not in text, (place.path, text)
    _nothing_is_open(server)


@pytest.mark.parametrize("path", DRAWING)
@pytest.mark.parametrize("one", limits.FURTHER_LIMITS, ids=lambda one: one.field)
def test_limits_that_no_type_has(server: RunningServer, path: str, one: limits.FurtherLimit):
    names = {place.path for place in places(inspect.type_info(KINDS[path]))}
    for name in {one.field, f"options.{one.field}"} & names:
        wrapped = {"options": {one.field: one.outside}} if "." in name else {name: one.outside}
        status, text = _posted(server, path, wrapped)
        assert (status, one.field in text) == (400, True), (status, text)
        if one.inside is not None:
            wrapped = {"options": {one.field: one.inside}} if "." in name else {name: one.inside}
            assert _posted(server, path, wrapped)[0] == 200


def _nothing_is_open(server: RunningServer) -> None:
    """All that was counted has ended, and the server is well."""
    assert "localkv_texts_open 0.0" in server.get("/metrics")[1]
    assert server.get("/health") == (200, {"status": "ok"})


def test_odd_values_are_answered(server: RunningServer):
    for path, body in islice(odd_requests(7), 400):
        status, answer = server.post(path, body)
        assert status in (200, 400, 404, 422, 501), (path, body[:200], status, answer)
        assert isinstance(answer, dict) or b'"stream": ' in body, (path, body[:200], answer)
    _nothing_is_open(server)


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 2**64}, {"n_probs": 2**64}, {"seed": 2**64 - 1, "n": 2}, {"id_slot": 2**64}],
    ids=str,
)
def test_an_integer_that_is_too_large_leaves_nothing(server: RunningServer, fields: dict[str, Any]):
    for _ in range(3):
        status, text = _posted(server, "/completion", fields)
        assert (status, next(iter(fields)) in text) == (400, True), text
    _nothing_is_open(server)


def test_seeds_of_several_texts_stay_seeds():
    last = SamplingParams(seed=2**63 - 1)
    seeds = [with_seed(Submit(0, [1], last), n).params.seed for n in range(3)]
    assert seeds == [2**63 - 1, 0, 1]


SILENT = [sys.executable, "-c", "import sys; sys.stdin.buffer.read()"]
"""An engine that never says anything."""


async def _silent_client() -> TextClient:
    client = TextClient(EngineOptions("none.gguf"), command=SILENT)
    await client.start()
    return client


def test_what_can_not_be_sent_is_not_counted():
    async def run() -> None:
        client = await _silent_client()
        good, bad = Submit(0, [1], SamplingParams()), Submit(0, [2**64], SamplingParams())
        with pytest.raises(OverflowError):
            client.submit([good, bad])
        assert client.n_open == len(client.open) == 0
        client.submit([good, good])
        assert client.n_open == len(client.open) == 2
        await client.stop()

    asyncio.run(run())


def test_health_tells_an_engine_that_stands_still(monkeypatch: pytest.MonkeyPatch):
    async def run() -> None:
        front = front_of()
        front.supervisor.client = client = await _silent_client()
        client.take(Facts(FACTS, 0.0, 9, 9, 9, 1, 9, 9, 9, {}))
        monkeypatch.setattr(front_module, "STALLED_SECONDS", 0.05)
        await asyncio.sleep(0.1)
        front.check_progress()  # it has no work
        texts = client.submit([Submit(0, [1], SamplingParams())])
        front.check_progress()  # nor for long
        await asyncio.sleep(0.1)
        with pytest.raises(RequestError, match="not made a step for 0 s, for 1 request") as error:
            front.check_progress()
        assert error.value.status == 503
        texts.close()  # which the engine does not hear either
        with pytest.raises(RequestError, match="for 0 requests"):
            front.check_progress()
        await client.stop()

    asyncio.run(run())


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"NaN", b"Infinity", b"1" + b"0" * 5000])
@pytest.mark.parametrize(
    "fields",
    [b'"top_k":N', b'"temperature":N', b'"logit_bias":{"5":N}', b'"logit_bias":[[N,1]]', b'"n":N'],
)
def test_numbers_that_no_type_holds(server: RunningServer, fields: bytes, number: bytes):
    body = b'{"prompt":"a","n_predict":1,' + fields.replace(b"N", number) + b"}"
    status, answer = server.post("/completion", body)
    assert status == 400
    name = fields.split(b'"')[1].decode()
    assert name in answer["error"]["message"] or number in (b"NaN", b"Infinity")


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": 'root ::= "a"+', "logit_bias": [[token, False] for token in range(1023)]},
        {"logit_bias": [[token, False] for token in range(1024)]},
        {"temperature": 5e-324},
        {"logit_bias": [[5, 1e308]]},
        {"n": 3, "logit_bias": [[5000, 1]]},
        {"repeat_penalty": 0},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_can_not_be_drawn_is_the_request_s_error(server: RunningServer, fields: dict):
    for path in ("/completion", "/v1/completions"):
        assert _posted(server, path, fields)[0] == 400
    options = {"options": fields}
    if "grammar" not in fields:
        assert _posted(server, "/api/generate", options)[0] == 400
    _nothing_is_open(server)


def test_what_a_request_began_ends_with_it_whatever_goes_wrong():
    ended = list[str]()

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["record"].at_end.append(lambda: ended.append("text"))
        raise RuntimeError("between the beginning of a text and its answer")

    scope = {"type": "http", "method": "POST", "path": "/completion", "headers": []}
    with pytest.raises(RuntimeError):
        asyncio.run(Recorder(broken, models_of())(scope, None, None))  # type: ignore[arg-type]
    assert ended == ["text"]
