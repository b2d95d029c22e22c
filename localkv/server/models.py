"""The models that a server offers: which are loaded, which have to go for others, and who waits.

Each model has an engine's process of its own. It is loaded by the first request that names it, or
at the start. What a model takes is counted as `localkv plan` counts it, before it is loaded. If
there is no room for it, the model that was used longest ago goes, once its answers are complete.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from localkv.chat.engine import EngineOptions, EngineStoppedError
from localkv.config import Overrides
from localkv.engine_process.client import EngineFailedError
from localkv.engine_process.texts import Facts
from localkv.errors import LocalKVError, byte_size, counted, printable
from localkv.server.access import key_origins
from localkv.server.engine_client import Supervisor
from localkv.server.failures import RequestError, as_request_error
from localkv.server.front import Front
from localkv.server.json_body import make_decoders
from localkv.server.request_record import AccessLog, RequestRecord
from localkv.server.settings import ModelSettings, ServerSettings
from localkv.server.work import Work
from localkv.system.machine_memory import RUNTIME_BYTES, Budget, gpu_memory, machine_memory

if TYPE_CHECKING:
    from localkv.server.metrics import ServerMetrics

MOST_TOLD = 100
"""Most warnings of requests that the server prints, so that strangers can't fill its log."""
FAILED_SECONDS = 2.0
"""How long a model that could not be loaded is not tried again."""
LATEST = ":latest"
"""The tag that ollama adds to names that have none."""
LONGEST_KEPT = 1e9
"""Seconds from which on a model stays for ever."""
MOST_NAMED = 5
"""Names of models that an error spells out."""


class Keep(NamedTuple):
    """How long a model stays loaded after a request.

    Attributes:
        seconds: without a further one; None for ever.
    """

    seconds: float | None

    @classmethod
    def of(cls, given: float | str | None) -> Keep | None:
        """ollama's `keep_alive`: seconds, or a duration as Go has it; a negative one for ever.

        Raises:
            RequestError: it is none.

        >>> Keep.of("1h30m"), Keep.of(-1), Keep.of("0")
        (Keep(seconds=5400.0), Keep(seconds=None), Keep(seconds=0.0))
        """
        if given is None:
            return None
        seconds = _seconds(given) if isinstance(given, str) else given
        if seconds is None:
            raise RequestError(
                400,
                f"keep_alive is {given!r:.70}",
                'use seconds, or a duration such as "5m", "1h30m" or "-1" for ever',
                extra={"param": "keep_alive"},
            )
        return cls(None if seconds < 0 or seconds > LONGEST_KEPT else float(seconds))


_DURATION = re.compile(r"([+-]?)((?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h))+", re.ASCII)
_PART = re.compile(r"([\d.]+)(ns|us|µs|ms|s|m|h)", re.ASCII)
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)", re.ASCII)


def _seconds(text: str) -> float | None:
    """A duration; None if it is none."""
    if _NUMBER.fullmatch(text):
        return float(text)
    if _DURATION.fullmatch(text) is None:
        return None
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    return -seconds if text.startswith("-") else seconds


@dataclass(frozen=True)
class Need:
    """The memory that a loaded model takes, as `localkv plan` counts it.

    Attributes:
        weights, cache: bytes of the model, and of K and V of all its requests.
        n_bytes: all of it, with scratch and the engine's program.
        cache_tokens: tokens that its cache has room for; None where its engine finds out.
    """

    weights: int
    cache: int
    n_bytes: int
    cache_tokens: int | None = None

    def __str__(self) -> str:
        tokens = "" if self.cache_tokens is None else f" of {self.cache_tokens:,} tokens"
        return (
            f"{byte_size(self.n_bytes)} ({byte_size(self.weights)} of weights, "
            f"{byte_size(self.cache)} of K and V{tokens})"
        )


def need_of(options: EngineOptions, budget: Budget | None, backend: str) -> Need:
    """What a model takes.

    A cache that is to fit gets as many tokens as it would get if the model were alone in `budget`.

    Args:
        budget: memory for all models; None if nobody knows.
        backend: where its engine runs.

    Raises:
        LocalKVError: the file can't be used, or the model can't have such a cache.
    """
    from localkv.chat.model_choice import memory_of
    from localkv.loader.gguf_file import open_gguf
    from localkv.loader.model_header import with_overrides
    from localkv.memory.fit import cache_in_bytes, tokens_that_fit

    arguments = options.arguments
    runtime = RUNTIME_BYTES["cuda" if backend == "cuda" else "cpu"]
    header = with_overrides(open_gguf(options.model), Overrides.of(arguments))
    memory, cache = memory_of(header, arguments, backend)
    n_tokens = arguments.get("n_cache_tokens")
    if n_tokens == "fit":
        alone = budget and replace(budget, n_bytes=max(0, budget.n_bytes - runtime))
        n_tokens = tokens_that_fit(memory, cache, alone)
    cache = replace(cache, n_tokens=n_tokens)
    if (n_bytes := arguments.get("n_cache_bytes")) is not None:
        cache, _ = cache_in_bytes(memory, cache, n_bytes)
    plan = memory.plan(cache)
    weights = plan.weights_mapped + plan.weights_allocated
    return Need(weights, plan.cache_k + plan.cache_v, plan.total + runtime, n_tokens)


class ServedModel:
    """A model that the server knows, and what becomes of it.

    Args:
        settings: the model.
        work: the server's.
        say: tells the user what happens to it.
        origins: as `Front` has them.

    Attributes:
        front: answers requests to it.
        need: the memory that it takes, once that was counted.
        holds: the memory is taken: it is loaded, or about to be.
        is_up: it was loaded, and its engine has not been ended since.
        leaves: its memory is wanted: new requests wait until it is loaded again.
        is_to_go: somebody asked for its end.
        sleeps: its engine ended since nobody used it.
        was_loaded: it was loaded at least once.
        n_active: requests that are being answered.
        last_used: when the last one was, by `time.monotonic`.
        idle_seconds: seconds after the last one when its engine ends; None for never.
        expires: when that will be, in seconds since 1970; None for never.
        failure: why it could not be loaded, or why its engines died, and `exit_code` of the last.
        living: from when it is wanted to the end of its engine.
        waiting: requests that wait until it is loaded, in order.
    """

    def __init__(
        self,
        settings: ModelSettings,
        work: Work,
        say: Callable[[str], None] = lambda line: None,
        origins: Sequence[bytes] = (b"",),
    ) -> None:
        self.settings = settings
        self.supervisor = Supervisor(settings.engine, say)
        self.front = Front(settings, self.supervisor, work, origins)
        self.need: Need | None = None
        self.holds = self.is_up = self.leaves = self.is_to_go = False
        self.sleeps = self.was_loaded = False
        self.n_active, self.last_used = 0, 0.0
        self.idle_seconds = settings.idle_seconds
        self.expires: float | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.failure: RequestError | None = None
        self.failed_at, self.exit_code = 0.0, 0
        self.living: asyncio.Task[None] | None = None
        self.waiting = list[asyncio.Future[None]]()

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.settings.model_name

    @property
    def device(self) -> str:
        """Where its engine runs, as it was asked for."""
        device: str = self.settings.engine.arguments.get("device") or "auto"
        return device

    @property
    def is_loaded(self) -> bool:
        """Whether its engine can answer."""
        return self.supervisor.facts is not None

    @property
    def status(self) -> dict[str, Any]:
        """llama-server's object `status` of a model."""
        if self.is_loaded:
            return {"value": "loaded"}
        if self.living is not None:
            return {"value": "loading", "progress": self.supervisor.progress}
        if self.failure is not None:
            told = {"failed": True, "exit_code": self.exit_code, "error": str(self.failure)}
            return {"value": "unloaded", **told}
        return {"value": "sleeping" if self.sleeps else "unloaded"}

    @property
    def is_idle(self) -> bool:
        """Whether its engine could end now without anybody's notice."""
        return not self.n_active and (self.leaves or not self.waiting)

    def admit(self) -> None:
        """Let all who wait for it go on, if they can."""
        if not self.is_loaded or self.leaves:
            return
        for waiter in self.waiting:
            if not waiter.done():
                self.n_active += 1
                waiter.set_result(None)
        self.waiting.clear()

    def refuse(self, error: RequestError) -> None:
        """Tell all who wait for it that it does not come."""
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_exception(error)
        self.waiting.clear()


class Models:
    """All models of a server, and what they share.

    Args:
        settings: what the server was started with.
        say: tells the user what happens, a line each.
        on_ready: is told of each model that was loaded.

    Attributes:
        is_draining: the server takes no new requests.
        log: of requests, if there is one.
        metrics: of requests, once the library for them is there.
        work: runs what would hold up the event loop.
        broken: set once the only model can't be kept running, for the reason in `problem`.
    """

    def __init__(
        self,
        settings: ServerSettings,
        say: Callable[[str], None] = lambda line: None,
        on_ready: Callable[[ModelSettings, Facts], None] = lambda settings, facts: None,
    ) -> None:
        self.settings = settings
        self.is_draining = False
        self.work = Work()
        self.metrics: ServerMetrics | None = None
        self.log: AccessLog | None = None
        self.broken = asyncio.Event()
        self.problem: LocalKVError | None = None
        self._say, self._on_ready = say, on_ready
        self._room = asyncio.Lock()
        self._changed = asyncio.Event()
        self._told = set[str]()
        self._tasks = set[asyncio.Task[Any]]()
        self._has_gpu, self._is_closed = False, False
        self._knows_memory = asyncio.Event()
        self._budgets: dict[str, Budget | None] = {}
        origins = key_origins(settings.api_keys)
        self._models = [
            ServedModel(one, self.work, self._say_of(one.model_name), origins)
            for one in settings.models
        ]

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def first(self) -> ServedModel:
        """The model that answers requests that name none."""
        return self._models[0]

    @property
    def are_several(self) -> bool:
        """Whether there is more than one model."""
        return len(self._models) > 1

    def _say_of(self, name: str) -> Callable[[str], None]:
        """What tells of one of the models, by its name if there are several."""
        if len(self.settings.models) == 1:
            return self._say
        return lambda line: self._say(f"{printable(name)}: {line}")

    def tell_once(self, warnings: tuple[str, ...]) -> None:
        """Print what has no effect in requests, each line once."""
        for line in warnings:
            if line not in self._told and len(self._told) < MOST_TOLD:
                self._told.add(line)
                self._say(f"warning: {printable(line)}")

    def named(self, name: str | None) -> ServedModel:
        """The model that a request means.

        Raises:
            RequestError: 404, there is none of this name.
        """
        if not name:
            return self.first
        found = self._find(name)
        if found is None and not self.settings.checks_model and not self.are_several:
            return self.first
        return found or self.listed(name)

    def listed(self, name: str) -> ServedModel:
        """The model of a name, whether requests may use any or not.

        Raises:
            RequestError: 404, there is none.
        """
        found = self._find(name)
        if found is None:
            names = [one.name for one in self._models[:MOST_NAMED]]
            more = ", ..." if len(self._models) > MOST_NAMED else ""
            raise RequestError(
                404,
                f"there is no model {name!r:.100} here",
                f"use {' or '.join(map(repr, names))}{more}",
                extra={"param": "model"},
            )
        return found

    def _find(self, name: str) -> ServedModel | None:
        for asked in (name, name.removesuffix(LATEST)):
            for one in self._models:
                if asked in one.settings.names:
                    return one
        return None

    async def load(self) -> None:
        """Make what all requests need, and load the models that are loaded at the start."""
        if self._counts:
            await asyncio.to_thread(self._find_memory)
            self._knows_memory.set()
        for one in self._models:
            if one.settings.loads_at_start:
                self.begin_loading(one)
        await asyncio.to_thread(make_decoders)
        self.metrics = await asyncio.to_thread(_new_metrics, self._models)
        if self._counts:
            await self._tell_needs()

    @property
    def _counts(self) -> bool:
        """Whether models may have to go for others, so that the memory of each has to be known."""
        return self.are_several or self.settings.models_memory is not None

    def _find_memory(self) -> None:
        """Find out how much memory there is, before a model takes some."""
        gpu = None
        if any(one.device in ("auto", "cuda") for one in self._models):
            gpu = gpu_memory()
        self._has_gpu = gpu is not None
        self._budgets = {"cuda": gpu, "cpu": machine_memory()}
        if (given := self.settings.models_memory) is not None:
            self._budgets["cuda" if gpu else "cpu"] = Budget(given, "--models-memory")

    def _where(self, model: ServedModel) -> str:
        """Where a model's engine runs: "cuda", "cpu" or "reference"."""
        if model.device == "auto":
            return "cuda" if self._has_gpu else "cpu"
        return model.device

    def budget_of(self, model: ServedModel) -> Budget | None:
        """Memory for all models that run where this one does; None if nobody knows."""
        return self._budgets.get("cuda" if self._where(model) == "cuda" else "cpu")

    async def _need(self, model: ServedModel) -> Need:
        """What a model takes.

        Raises:
            LocalKVError: its file can't be used.
        """
        await self._knows_memory.wait()
        if model.need is None:
            engine, budget = model.settings.engine, self.budget_of(model)
            model.need = await asyncio.to_thread(need_of, engine, budget, self._where(model))
        return model.need

    async def _tell_needs(self) -> None:
        """Say what each model takes, and how much all may."""
        for one in self._models:
            try:
                need = await self._need(one)
            except LocalKVError as error:
                self._say(f"warning: {printable(one.name)}: {error}")
                continue
            self._say(f"{printable(one.name)} takes {need}")
        budget, most = self.budget_of(self.first), self.settings.models_max
        limits = [f"{byte_size(budget.n_bytes)} ({budget.source})"] if budget else []
        if most:
            limits.append(f"be {most} at most")
        if limits:
            several = counted(len(self._models), "model")
            self._say(f"{several}: the loaded ones may take {' and '.join(limits)}")

    @staticmethod
    def is_ready(model: ServedModel) -> bool:
        """Whether a model can answer now."""
        return model.is_loaded and not model.leaves

    async def use(
        self,
        model: ServedModel,
        record: RequestRecord,
        keep: Keep | None = None,
        *,
        loads: bool = True,
    ) -> None:
        """Wait until a model can answer a request, which counts as answered when it ends.

        Args:
            keep: how long the model stays loaded after the request.
            loads: it is loaded if it has to be.

        Raises:
            RequestError: it can't be loaded, is not to be, or is not in time.
        """
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None
        model.idle_seconds = model.settings.idle_seconds if keep is None else keep.seconds
        if self.is_ready(model):
            model.n_active += 1
        else:
            began = time.perf_counter()
            await self._wait(model, loads=loads)
            record.waited = time.perf_counter() - began
        model.expires = None
        record.at_end.append(partial(self._answered, model))

    async def _wait(self, model: ServedModel, *, loads: bool) -> None:
        settings = model.settings
        if not loads and model.living is None:
            raise RequestError(
                400, f"the model {model.name!r:.100} is not loaded", "POST /models/load loads it"
            )
        if model.failure is not None and time.monotonic() - model.failed_at < FAILED_SECONDS:
            raise model.failure
        if len(model.waiting) >= settings.queue:
            raise RequestError(
                429,
                f"{counted(len(model.waiting), 'request')} wait already for this model",
                "ask again later, or start the server with a larger --queue",
                headers={"retry-after": "5"},
            )
        self.begin_loading(model)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.waiting.append(waiter)
        try:
            async with asyncio.timeout(settings.timeout):
                await waiter
        except (TimeoutError, asyncio.CancelledError) as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._answered(model)  # it was let in, and has gone away
            if not isinstance(error, TimeoutError):
                raise
            raise RequestError(
                504, f"the model was not loaded within {settings.timeout:g} s", "see --timeout"
            ) from None
        finally:
            if waiter in model.waiting:
                model.waiting.remove(waiter)

    def _answered(self, model: ServedModel) -> None:
        """A request to a model has ended."""
        model.n_active -= 1
        model.last_used = time.monotonic()
        self._changed.set()
        if not model.n_active:
            self._rest(model)

    def _rest(self, model: ServedModel) -> None:
        """Nobody uses a model: let its engine end in a while."""
        seconds = model.idle_seconds
        if seconds is None or not model.living:
            return
        loop = asyncio.get_running_loop()
        model.expires = time.time() + seconds
        model.timer = loop.call_later(seconds, self._expired, model)

    def _expired(self, model: ServedModel) -> None:
        model.timer = None
        if not model.n_active and not model.waiting and model.living:
            self._start(self.unload(model, sleeps=True))

    def begin_loading(self, model: ServedModel) -> None:
        """Load a model, unless it is loaded or about to be."""
        if model.living is None and not self._is_closed:
            model.failure, model.sleeps = None, False
            model.living = self._start(self._live(model))

    def _start(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _live(self, model: ServedModel) -> None:
        """A model's time from when it is wanted to the end of its engine."""
        preparing: asyncio.Task[None] | None = None
        try:
            await self._make_room(model)
            preparing = asyncio.create_task(model.front.load())
            await model.supervisor.run(partial(self._ready, model))
        except LocalKVError as error:
            self._failed(model, error)
        except OSError as error:  # the file has gone, or can't be read
            self._failed(model, LocalKVError(str(error)))
        finally:
            if preparing is not None:
                preparing.cancel()
            model.front.unload()
            model.holds = model.is_up = model.leaves = model.is_to_go = False
            model.living = model.expires = None
            self._changed.set()
        if model.waiting:  # they came when it had to go
            self.begin_loading(model)

    def _ready(self, model: ServedModel, facts: Facts) -> None:
        """Its engine can answer: the first one, or one that takes the place of another."""
        if not model.is_up:
            self._on_ready(model.settings, facts)
        model.is_up = model.was_loaded = True
        model.last_used = time.monotonic()
        model.admit()
        self._changed.set()
        if not model.n_active:
            self._rest(model)

    def _failed(self, model: ServedModel, error: LocalKVError) -> None:
        """A model can't be loaded, or its engines died too often."""
        if isinstance(error, RequestError | EngineStoppedError):
            model.failure = as_request_error(error)
        else:
            reason = f"the model {model.name!r:.100} can't be loaded: {error.message}"
            model.failure = RequestError(500, reason, error.hint)
        model.failed_at = time.monotonic()
        model.exit_code = error.exit_code if isinstance(error, EngineFailedError) else 1
        model.refuse(model.failure)
        if self.are_several:
            self._say(f"warning: {model.failure}")
        else:
            self.problem = error
            self.broken.set()

    async def _make_room(self, model: ServedModel) -> None:
        """Take the memory that a model needs, in the order in which models were asked for.

        Raises:
            RequestError: it needs more than there is.
            LocalKVError: its file can't be used.
        """
        if not self._counts:
            model.holds = True  # the engine finds out what is free
            return
        need, budget = await self._need(model), self.budget_of(model)
        if budget is not None and need.n_bytes > budget.n_bytes:
            raise RequestError(
                400,
                f"the model {model.name!r:.100} takes {need}, and all models together may take "
                f"{byte_size(budget.n_bytes)} ({budget.source})",
                "use a shorter context (-c), fewer bits of K and V (-ctk, -ctv), a smaller file, "
                "or a larger --models-memory",
            )
        arguments = {**model.settings.engine.arguments}
        if arguments.get("n_cache_tokens") == "fit":
            arguments["n_cache_tokens"] = need.cache_tokens
        model.supervisor.options = replace(model.settings.engine, arguments=arguments)
        async with self._room:
            try:
                while others := self._in_the_way(model):
                    victim = min(
                        others, key=lambda one: (not one.is_up, not one.is_idle, one.last_used)
                    )
                    self._changed.clear()
                    if victim.is_up and victim.is_idle:
                        self._say(f"{printable(victim.name)} goes, {printable(model.name)} comes")
                        await self.unload(victim)
                        continue
                    victim.leaves = victim.is_up
                    await self._changed.wait()
                model.holds = True
            finally:
                for one in self._models:
                    if one.leaves and not one.is_to_go:
                        one.leaves = False
                        one.admit()

    def _in_the_way(self, model: ServedModel) -> list[ServedModel]:
        """The models one of which has to go before another is loaded; empty if there is room."""
        holders = [one for one in self._models if one.holds]
        if self.settings.models_max and len(holders) >= self.settings.models_max:
            return holders
        budget, where = self.budget_of(model), self._where(model) == "cuda"
        beside = [one for one in holders if (self._where(one) == "cuda") == where]
        taken = sum(one.need.n_bytes for one in (*beside, model) if one.need is not None)
        return beside if budget is not None and taken > budget.n_bytes else []

    async def unload(self, model: ServedModel, *, sleeps: bool = False) -> None:
        """End a model's engine at once, or give up to load it; its memory is free then."""
        living = model.living
        if living is None:
            return
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None
        model.sleeps = sleeps
        if model.holds:
            await model.supervisor.stop()
        else:
            living.cancel()
        await asyncio.wait({living})

    async def let_go(self, model: ServedModel) -> None:
        """End a model's engine once all requests to it are answered."""
        if not model.is_up:
            model.refuse(RequestError(503, f"the model {model.name!r:.100} was unloaded"))
        model.leaves = model.is_to_go = True
        while model.n_active and model.is_to_go:
            self._changed.clear()
            await self._changed.wait()
        await self.unload(model)

    def begin_letting_go(self, model: ServedModel) -> None:
        """Do so beside the request at hand."""
        if not model.is_to_go:
            self._start(self.let_go(model))

    def check_health(self) -> None:
        """Refuse a request if the server can't answer: an engine stands still, or a model that is
        loaded at the start is not there yet. Models that come later make no difference.

        Raises:
            RequestError: 503, with the reason.
        """
        for one in self._models:
            is_awaited = one.settings.loads_at_start and not one.was_loaded
            if not self.are_several:
                is_awaited = one.living is not None or not one.was_loaded
            if one.is_loaded or (is_awaited and one.failure is None):
                one.front.check_progress()

    async def close(self) -> None:
        """End all engines; answers that are not complete say so."""
        self._is_closed = True
        ending = RequestError(503, "the server is ending", headers={"retry-after": "5"})
        for one in self._models:
            one.refuse(ending)
        await asyncio.gather(*(self.unload(one) for one in self._models))
        for task in self._tasks:
            task.cancel()


def _new_metrics(models: Iterable[ServedModel]) -> ServerMetrics:
    """Metrics, whose library takes a while to import."""
    from localkv.server.metrics import ServerMetrics

    return ServerMetrics({one.name: one.front for one in models})
