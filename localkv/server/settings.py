"""What the server is started with."""

from __future__ import annotations

from dataclasses import dataclass, field

from localkv.chat.engine import EngineOptions
from localkv.sampling.params import SamplingParams

MOST_BODY = 8 << 20
"""Bytes of a request's body."""

REASONING = ("auto", "on", "off")
"""Whether a model reasons where requests say nothing; "auto": if its template can be told to by the
variable that llama-server sets."""

REASONING_FORMATS = ("auto", "none", "deepseek")
"""Where reasoning is: in the text with "none", else in a field of its own."""


@dataclass(frozen=True)
class ModelSettings:
    """A model that a server offers, and what requests to it may do.

    Attributes:
        engine: the model's file, and how it is loaded.
        model_name: what clients call it.
        aliases: what they may call it, too.
        tags: words about it.
        params: how tokens are drawn where a request says nothing.
        max_tokens: most tokens of an answer where a request says nothing; None sets no limit.
        reasoning: one of `REASONING`.
        reasoning_format: one of `REASONING_FORMATS`.
        reasoning_budget: most tokens of reasoning where a request says nothing; -1 sets no limit.
        reasoning_effort: how much the model reasons where a request says nothing; None leaves it to
            the template.
        preserve_reasoning: whether a prompt keeps the reasoning of earlier answers where a request
            says nothing; None keeps it where the template has a switch for that.
        prefills: an assistant's message that is the last one goes on, instead of being answered.
        queue: most requests that wait while others run.
        timeout: seconds that a request may take.
        has_slots: whether `/slots` tells what runs.
        state_dir: the folder of saved slots; None for none.
        cache_per_key: only requests with the same key share what was evaluated.
        spm_infill: where a middle is filled in, the suffix comes before the prefix.
        pooling: of embeddings (`POOLINGS`); None for the model's own.
        loads_at_start: it is loaded before anybody asks for it.
        idle_seconds: seconds without a request after which its engine ends; None for never.
    """

    engine: EngineOptions
    model_name: str
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    reasoning: str = "auto"
    reasoning_format: str = "auto"
    reasoning_budget: int = -1
    reasoning_effort: str | None = None
    preserve_reasoning: bool | None = None
    prefills: bool = True
    queue: int = 256
    timeout: float = 600.0
    has_slots: bool = True
    state_dir: str | None = None
    cache_per_key: bool = False
    spm_infill: bool = False
    pooling: str | None = None
    loads_at_start: bool = True
    idle_seconds: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What clients call it."""
        return (self.model_name, *self.aliases)


@dataclass(frozen=True)
class ServerSettings:
    """Where a server listens, and what it allows.

    Attributes:
        models: what it offers; the first one answers requests that name none.
        checks_model: refuse names that no model has, which else mean the first.
        models_memory: bytes that all loaded models may take together; None for what is free.
        models_max: most models that are loaded at the same time; 0 sets no limit.
        autoloads: a request loads the model that it names.
        hosts, port: where it listens; port 0 takes a free one.
        api_keys: a request must have one of these; empty for anybody.
        cors: origins that browsers may call it from.
        has_page: whether there is a page at `/`.
        has_metrics: whether there is `/metrics`.
        allowed_hosts: names that it goes by, in addition to its address.
        is_insecure: listen for other machines without a key.
        ssl_key, ssl_cert: files in PEM; None for no TLS.
        drain: seconds that running requests have when the server ends.
        log_file: where a line for each request goes; "-" for stderr, None for nowhere.
    """

    models: tuple[ModelSettings, ...]
    checks_model: bool = False
    models_memory: int | None = None
    models_max: int = 0
    autoloads: bool = True
    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    api_keys: frozenset[str] = frozenset()
    cors: tuple[str, ...] = ()
    has_page: bool = True
    has_metrics: bool = True
    allowed_hosts: tuple[str, ...] = ()
    is_insecure: bool = False
    ssl_key: str | None = None
    ssl_cert: str | None = None
    drain: float = 30.0
    log_file: str | None = None
