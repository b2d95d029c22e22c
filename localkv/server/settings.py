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
class ServerSettings:
    """Where a server listens, and what it allows.

    Attributes:
        engine: the model, and how it is loaded.
        model_name: what clients call it.
        aliases: what they may call it, too.
        tags: words about it.
        checks_model: refuse other names, which else mean this model, too.
        hosts, port: where it listens; port 0 takes a free one.
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
        api_keys: a request must have one of these; empty for anybody.
        cors: origins that browsers may call it from.
        has_page: whether there is a page at `/`.
        has_metrics: whether there is `/metrics`.
        has_slots: whether `/slots` tells what runs.
        allowed_hosts: names that it goes by, in addition to its address.
        is_insecure: listen for other machines without a key.
        ssl_key, ssl_cert: files in PEM; None for no TLS.
        drain: seconds that running requests have when the server ends.
        log_file: where a line for each request goes; "-" for stderr, None for nowhere.
        state_dir: the folder of saved slots; None for none.
        cache_per_key: only requests with the same key share what was evaluated.
        spm_infill: where a middle is filled in, the suffix comes before the prefix.
        pooling: of embeddings (`POOLINGS`); None for the model's own.
    """

    engine: EngineOptions
    model_name: str
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    checks_model: bool = False
    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
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
    api_keys: frozenset[str] = frozenset()
    cors: tuple[str, ...] = ()
    has_page: bool = True
    has_metrics: bool = True
    has_slots: bool = True
    allowed_hosts: tuple[str, ...] = ()
    is_insecure: bool = False
    ssl_key: str | None = None
    ssl_cert: str | None = None
    drain: float = 30.0
    log_file: str | None = None
    state_dir: str | None = None
    cache_per_key: bool = False
    spm_infill: bool = False
    pooling: str | None = None
