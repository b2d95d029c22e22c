"""The server as an application of Ray Serve: `serve run localkv.server.cluster.ray_app:build`.

    serve run localkv.server.cluster.ray_app:build model=model.gguf replicas=2 cache_type_k=q8_0

`Gate` takes requests, and `Engine`s answer them, each with the front and the engine's process of
`localkv serve`. A request goes to the engine that has evaluated most of how it begins
(`PrefixRouter`); what an engine computes does not depend on that, only how soon.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from localkv.chat.engine import EngineOptions
from localkv.errors import UsageError, counted
from localkv.server.app import application
from localkv.server.cluster.prefix_directory import PrefixDirectory, prefix_keys, ranked, text_of
from localkv.server.failures import RequestError
from localkv.server.json_answer import error_answer, error_piece
from localkv.server.models import Models
from localkv.server.settings import MOST_BODY, ModelSettings, ServerSettings

STATS_SECONDS = 1.0
"""How often engines tell what they hold."""
PATIENCE = 10.0
"""Seconds that an engine may wait for other programs' resources before a warning says so."""
ENGINES = "Engine"
"""Ray's name for the engines."""
ENGINE_HEADER = b"x-localkv-engine"
"""The header of an answer that names the engine that it comes from."""


class Forwarded(msgspec.Struct):
    """A request on its way to an engine.

    Attributes:
        keys: of how its prompt begins (`prefix_keys`).
    """

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    keys: list[bytes]


class PrefixRouter(RequestRouter):
    """Sends a request where most of its beginning is evaluated, if there is not too much to do."""

    def initialize_state(self) -> None:
        self._directory = PrefixDirectory()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Replicas in the order in which they are to be tried."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._directory.keep(list(by_name))
        for name, replica in by_name.items():
            if n_tokens := replica.routing_stats.get("cache_tokens"):
                self._directory.hold(name, n_tokens)
        loads = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for name, replica in by_name.items()
        }
        order = ranked(self._directory, loads, _keys_of(pending_request))
        return [[by_name[name]] for name in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Remember where a request went."""
        self._directory.add(replica_id.unique_id, _keys_of(pending_request))


def _keys_of(request: PendingRequest | None) -> list[bytes]:
    if request is None or not request.args:
        return []
    # Ray may have made a new class for the argument, which is none of this module's
    keys: list[bytes] = getattr(request.args[0], "keys", [])
    return keys


@serve.deployment(
    name=ENGINES,
    request_router_config=RequestRouterConfig(
        request_router_class=PrefixRouter, request_routing_stats_period_s=STATS_SECONDS
    ),
    health_check_period_s=5,
)
class Engine:
    """One engine for each model, with the front that speaks their dialects; all live and end with
    the replica."""

    async def __init__(self, settings: ServerSettings) -> None:  # type: ignore[misc]  # Ray waits
        self._ready = asyncio.Event()
        self._models = Models(settings, print, lambda model, facts: self._ready.set())
        self._app = application(self._models)
        await self._models.load()
        if not self._models.are_several:
            ready = asyncio.create_task(self._ready.wait())
            broken = asyncio.create_task(self._models.broken.wait())
            await asyncio.wait({ready, broken}, return_when=asyncio.FIRST_COMPLETED)
        self.check_health()

    def check_health(self) -> None:
        """Raise what ended the engine of the only model, so that Ray starts another replica."""
        if self._models.problem is not None:
            raise self._models.problem

    def record_routing_stats(self) -> dict[str, int]:
        """What the router has to know."""
        known = [facts for one in self._models if (facts := one.supervisor.facts) is not None]
        return {"cache_tokens": sum(one.cache_tokens for one in known)} if known else {}

    async def answer(self, request: Forwarded) -> AsyncIterator[tuple[int, list[Any]] | bytes]:
        """Status and headers of the answer, then its body in pieces."""
        sent = asyncio.Queue[Message | None]()
        inbox = asyncio.Queue[Message]()
        inbox.put_nowait({"type": "http.request", "body": request.body, "more_body": False})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": request.path,
            "raw_path": request.path.encode(),
            "query_string": request.query,
            "root_path": "",
            "headers": request.headers,
            "client": None,
            "server": None,
        }

        async def run() -> None:
            try:
                await self._app(scope, inbox.get, sent.put)
            finally:
                sent.put_nowait(None)

        running = asyncio.create_task(run())
        name = serve.get_replica_context().replica_id.unique_id.encode()
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], [*message["headers"], (ENGINE_HEADER, name)]
                elif message.get("body"):
                    yield message["body"]
            await running
        finally:
            inbox.put_nowait({"type": "http.disconnect"})
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def __del__(self) -> None:
        await self._models.close()


Resources = Mapping[str, float]
"""Amounts of Ray's resources, by their names."""


def lacking(of_each: Resources, n_engines: int, nodes: Sequence[Resources]) -> str:
    """Why a cluster has no room for engines, and what would fit; empty if it has.

    Args:
        of_each: what an engine takes.
        nodes: what each machine has, in use or not.
    """
    if not of_each:
        return ""
    room = sum(min(int(node.get(name, 0) / n) for name, n in of_each.items()) for node in nodes)
    if room >= n_engines:
        return ""
    there = {name: sum(node.get(name, 0) for node in nodes) for name in of_each}
    fits = [f"replicas={room}"] if room else []
    for name, n in there.items() if len(nodes) == 1 else ():
        if of_each[name] * n_engines > n:
            fits.append(f"{name.lower()}s={int(100 * n / n_engines) / 100:g}")
    where = "this machine has" if len(nodes) == 1 else f"{len(nodes)} machines have"
    return (
        f"there is room for {room} of {counted(n_engines, 'engine')}: each takes "
        f"{_amounts(of_each)}, and {where} {_amounts(there)}; "
        f"{', '.join(fits)}{' or ' if fits else ''}another machine would fit"
    )


def _amounts(resources: Resources) -> str:
    return " and ".join(f"{n:g} {name}" for name, n in resources.items())


class Places(msgspec.Struct):
    """Where an application's engines are.

    Attributes:
        running: how many answer.
        waiting: how many no machine has room for yet.
        problem: why some wait, with what would work, or why none can begin; empty if all run.
    """

    running: int = 0
    waiting: int = 0
    problem: str = ""


def _places(app: str, of_each: Resources) -> Places:
    """The places as Ray sees them now."""
    details = _get_global_client().get_serve_details()
    deployments = details["applications"].get(app, {}).get("deployments", {})
    engines = deployments.get(ENGINES, {"replicas": [], "message": ""})
    running, starting, stopping = (
        [one for one in engines["replicas"] if one["state"] == state]
        for state in ("RUNNING", "STARTING", "STOPPING")
    )
    waiting, problem = sum(not one.get("node_id") for one in starting), ""
    if waiting and not stopping:  # those that end make room
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        problem = lacking(of_each, len(running) + len(starting), nodes)
    if not running and not problem and "Error: " in engines["message"]:
        problem = f"engines can't start: {engines['message'].strip().rpartition('Error: ')[2]}"
    return Places(len(running), 0 if stopping else waiting, problem)


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class Gate:
    """Takes requests from the network, and hands their answers back as they come.

    It takes none of Ray's CPUs, so any machine has room for it. Without it nobody would say what
    the engines wait for.
    """

    async def __init__(self, engines: DeploymentHandle, of_each: Resources) -> None:  # type: ignore[misc]
        self._engines = engines.options(stream=True)
        self._of_each, self._app = of_each, serve.get_replica_context().app_name
        self._places, self._said, self._waits_since = Places(), "", 0.0
        await self._look()
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(STATS_SECONDS)
            await self._look()

    async def _look(self) -> None:
        """See which engines are ready, and say what keeps the others from starting."""
        with suppress(RayError, RayServeException):  # Ray's controller is started again
            self._places = await asyncio.to_thread(_places, self._app, self._of_each)
        places, now = self._places, time.monotonic()
        if not places.waiting:
            self._waits_since = 0.0
        self._waits_since = self._waits_since or now
        if not places.problem and places.waiting and now - self._waits_since > PATIENCE:
            places.problem = (
                f"{counted(places.waiting, 'engine')} must wait for {_amounts(self._of_each)} that "
                "other programs of the cluster have; `ray status` shows them"
            )
        if places.problem and places.problem != self._said:
            print(f"warning: {places.problem}", flush=True)
        self._said = places.problem

    def _check(self) -> None:
        """Refuse a request that no engine can take.

        Raises:
            RequestError: 503.
        """
        if not self._places.running:
            problem = self._places.problem
            raise RequestError(
                503,
                f"no engine is ready: {problem or 'they are starting'}",
                headers={"retry-after": "5"},
            )

    async def __call__(self, request: Request) -> Response:
        """Forward a request."""
        path = request.url.path
        try:
            self._check()
            forwarded = await _forwarded(request)
            answer = self._engines.answer.remote(forwarded)
            status, headers = await self._begun(aiter(answer))
        except RequestError as error:
            return error_answer(path, error)
        except (RayActorError, DeploymentUnavailableError):
            return error_answer(path, _ENDED)
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        response = StreamingResponse(_rest(answer, path, kind.decode("latin-1")), status)
        response.raw_headers = [pair for pair in headers if pair[0] != b"content-length"]
        return response

    async def _begun(self, answer: AsyncIterator[Any]) -> tuple[int, list[Any]]:
        """Status and headers of an answer, or of an error if the engine has ended."""
        first = asyncio.ensure_future(_next(answer))
        try:
            while not (await asyncio.wait({first}, timeout=STATS_SECONDS))[0]:
                self._check()
            status, headers = first.result()
            return status, headers
        finally:
            first.cancel()


async def _next(answer: AsyncIterator[Any]) -> Any:
    return await anext(answer)


_ENDED = RequestError(
    503, "the engine that had the request has ended", headers={"retry-after": "1"}
)


async def _rest(answer: AsyncIterator[Any], path: str, kind: str) -> AsyncIterator[bytes]:
    """The body of an answer; an error in its stream if the engine ends."""
    try:
        async for piece in answer:
            yield piece
    except RayActorError:
        piece = error_piece(path, kind, _ENDED)
        if piece is None:
            raise  # the connection breaks off
        yield piece


async def _forwarded(request: Request) -> Forwarded:
    """A request as engines take it.

    Raises:
        RequestError: its body is too large.
    """
    body = await request.body()
    if len(body) > MOST_BODY:
        raise RequestError(413, f"the body has more than {MOST_BODY:,} bytes")
    return Forwarded(
        request.method,
        request.url.path,
        request.url.query.encode(),
        list(request.headers.raw),
        body,
        _keys(body),
    )


def _keys(body: bytes) -> list[bytes]:
    """How the prompt in a body begins; nothing for other bodies."""
    try:
        fields = msgspec.json.decode(body)
        return prefix_keys(text_of(fields)) if isinstance(fields, dict) else []
    except (msgspec.DecodeError, RecursionError):
        return []


def build(arguments: dict[str, str]) -> serve.Application:
    """The application.

    Args:
        arguments: "model" is a file that all nodes have, or several with commas between them, and
            "name" is what clients call them. "replicas" is a number; with "most_replicas" instead
            Ray starts as many as there is work for. "cpus" and "gpus" are what each has.
            "models_memory" are the bytes that the loaded models of a replica may take, and
            "models_max" is how many they may be. All others are arguments of `LLM`.

    Raises:
        UsageError: there is no model, there are more or fewer names, two are the same, or a number
            makes no sense.
    """
    known = dict(arguments)
    if "model" not in known:
        raise UsageError("no model is named", hint="model=FILE, which all machines have")
    files = [part.strip() for part in known.pop("model").split(",")]
    given = known.pop("name", None)
    names = [Path(file).stem for file in files] if given is None else given.split(",")
    names = [name.strip() for name in names]
    if len(names) != len(files) or len(set(names)) != len(names):
        raise UsageError(
            f"{counted(len(files), 'model')} and the names {', '.join(names)}",
            hint="each model needs a name of its own: name=A,B",
        )
    memory, models_max = known.pop("models_memory", None), known.pop("models_max", "0")
    most = known.pop("most_replicas", None)
    replicas = _count(known.pop("replicas", "1"), "replicas", least=1)
    resources = {
        f"num_{name}": _amount(known.pop(name, usual), name)
        for name, usual in (("cpus", "1"), ("gpus", "0"))
    }
    engine_arguments = {key: _value(text) for key, text in known.items()}
    n_parallel = int(engine_arguments.setdefault("n_parallel", 16))
    if len(files) > 1:
        engine_arguments.setdefault("n_cache_tokens", "fit")
    models = tuple(
        ModelSettings(EngineOptions(file, engine_arguments), name, loads_at_start=len(files) == 1)
        for file, name in zip(files, names, strict=True)
    )
    settings = ServerSettings(
        models,
        models_memory=None
        if memory is None
        else _count(memory, "models_memory", least=1, most=1 << 60),
        models_max=_count(models_max, "models_max", least=0),
    )
    options: dict[str, Any] = {
        "max_ongoing_requests": len(models) * (n_parallel + models[0].queue),
        "ray_actor_options": resources,
        "graceful_shutdown_timeout_s": settings.drain,
    }
    if most is None:
        options["num_replicas"] = replicas
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=replicas,
            max_replicas=_count(most, "most_replicas", least=replicas),
            target_ongoing_requests=n_parallel / 2,
        )
    engine: Any = Engine
    gate: Any = Gate
    of_each = {name[4:-1].upper(): n for name, n in resources.items() if n}
    return gate.bind(engine.options(**options).bind(settings), of_each)


def _count(text: str, name: str, *, least: int, most: int = 1 << 16) -> int:
    if not text.isdecimal() or not least <= int(text) < most:
        raise UsageError(f"{name} is {text!r}, expected a whole number from {least} on")
    return int(text)


def _amount(text: str, name: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < 1 << 16:
        raise UsageError(f"{name} is {text!r}, expected a number from 0 on")
    return amount


def _value(text: str) -> Any:
    """A number or a truth value, if the text is one."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
