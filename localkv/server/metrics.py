"""What the server counts, and how Prometheus reads it.

Each figure has a name of localkv's, and the names that vLLM and llama-server give it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from localkv.engine_process.texts import Ended, Event, Piece, Reading, Status
from localkv.server.engine_client import Supervisor
from localkv.server.request_record import RequestRecord

if TYPE_CHECKING:
    from localkv.server.front import Front

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SHORT = (0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 1, 2.5)
LONG = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
STEPS = (1, 2, 5, 10, 20, 30, 50, 80, 120, 200, 300, 500, 1000, 5000)


class ServerMetrics:
    """Counts requests, and has the metrics of each model.

    Args:
        fronts: the models' fronts by their names; each gets its `metrics`.
    """

    def __init__(self, fronts: Mapping[str, Front]) -> None:
        self._registry = CollectorRegistry()
        self._http = Counter(
            "localkv_http_requests", "HTTP requests by status.", ["status"], registry=self._registry
        )
        self._fronts = dict(fronts)
        for front in fronts.values():
            front.metrics = metrics = Metrics(front.supervisor)
            front.supervisor.client.on_status = metrics.take_status

    def answered(self, record: RequestRecord) -> None:
        """A request is done."""
        self._http.labels(record.status).inc()

    def text(self, model: str | None = None) -> bytes:
        """All of it, in Prometheus' format, or what is of one model.

        What several models count has a label `model`.
        """
        found = [front.metrics for name, front in self._fronts.items() if model in (None, name)]
        counted = [metrics for metrics in found if metrics is not None]
        if len(counted) == 1:
            return counted[0].text() + generate_latest(self._registry)
        families = dict[str, Metric]()
        for name, metrics in zip(self._fronts, counted, strict=True):
            for family in metrics.registry.collect():
                whole = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                whole.samples += [
                    sample._replace(labels={"model": name, **sample.labels})
                    for sample in family.samples
                ]
        joined = CollectorRegistry()
        joined.register(_Collected(families.values()))
        return generate_latest(joined) + generate_latest(self._registry)


class _Collected(Collector):
    """Families as they are."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class Metrics:
    """Counts what happens to one model.

    Args:
        supervisor: its engine's status is read, too.

    Attributes:
        longest: tokens of the longest text so far, its prompt included.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self.registry = registry = CollectorRegistry()
        self._supervisor = supervisor

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"localkv_{name}", words, labels, registry=registry)

        def seconds(name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"localkv_{name}_seconds", words, buckets=buckets, registry=registry)

        self.ended = counter("texts_ended", "Texts by the reason of their end.", "reason")
        self.prompt = counter("prompt_tokens", "Tokens of prompts that were evaluated.")
        self.prefix_asked = counter("prefix_asked_tokens", "Tokens of prompts.")
        self.prefix_hit = counter("prefix_hit_tokens", "Tokens of prompts found in the cache.")
        self.generated = counter("generated_tokens", "Tokens that were drawn.")
        self.drafted = counter("drafted_tokens", "Tokens that were guessed.")
        self.accepted = counter("accepted_tokens", "Tokens that were guessed rightly.")
        self.verified = counter("verified_batches", "Steps of texts that had guesses.")
        self.longest = 0
        self.prompt_seconds = counter("prompt_seconds", "Seconds until first tokens.")
        self.decode_seconds = counter("decode_seconds", "Seconds between first and last tokens.")
        self.first_token = seconds("first_token", "From a request to its first token.", LONG)
        self.next_token = seconds("next_token", "From a token to the next.", SHORT)
        self.request_seconds = seconds("text", "From a request to the end of its text.", LONG)
        self.steps = Histogram(
            "localkv_step_milliseconds",
            "Steps of the engine by the requests that generate in it; one with a part of a "
            "prompt counts separately.",
            ["rows"],
            buckets=STEPS,
            registry=registry,
        )
        registry.register(_Engine(self, supervisor))

    def take_status(self, status: Status) -> None:
        """The engine has made a step."""
        n_rows, n_prompt = status.rows
        if status.step_ms:
            self.steps.labels("prompt" if n_prompt else rows_label(n_rows)).observe(status.step_ms)

    def read(self, record: RequestRecord | None, n_tokens: int, seconds: float) -> None:
        """Texts of a request have become vectors or scores: all their tokens were a prompt's."""
        self.prefix_asked.inc(n_tokens)
        self.prompt.inc(n_tokens)
        self.prompt_seconds.inc(seconds)
        if record is not None:
            record.n_prompt += n_tokens

    def observer(self, record: RequestRecord | None, n_prompts: Mapping[int, int]) -> ObservedTexts:
        """Counts the tokens of texts that a request submits; `ObservedTexts` has the arguments."""
        return ObservedTexts(self, record, n_prompts)

    def text(self) -> bytes:
        """All of it, in Prometheus' format."""
        return generate_latest(self.registry)


def rows_label(n_rows: int) -> str:
    """Powers of two: the number of rows, or the next larger one."""
    return str(1 << max(0, n_rows - 1).bit_length())


class _Engine(Collector):
    """What the engine's status says, and other programs' names of what is counted."""

    def __init__(self, metrics: Metrics, supervisor: Supervisor) -> None:
        self._metrics, self._supervisor = metrics, supervisor

    def collect(self) -> Iterator[Metric]:
        yield from self._own()
        yield from self._vllm()
        yield from self._llama()

    def _own(self) -> Iterator[Metric]:
        status, facts = self._supervisor.client.status, self._supervisor.facts
        yield _gauge("localkv_requests_running", "Requests that run.", status.running)
        yield _gauge("localkv_requests_waiting", "Requests that wait.", status.waiting)
        n_open = self._supervisor.client.n_open
        yield _gauge("localkv_texts_open", "Texts that have not ended.", n_open)
        yield _gauge("localkv_engine_up", "Whether the model is loaded.", facts is not None)
        pages = GaugeMetricFamily(
            "localkv_cache_pages",
            "Pages of the cache: of requests that run, only of texts that are kept, of nobody; "
            "lost ones would be a bug.",
            labels=["state"],
        )
        n_pages = 0 if facts is None else facts.n_pages
        pages.add_metric(["running"], status.pages_running)
        pages.add_metric(["kept"], status.pages_kept)
        pages.add_metric(["lost"], status.pages_lost)
        n_taken = status.pages_running + status.pages_kept + status.pages_lost
        pages.add_metric(["free"], n_pages - n_taken)
        yield pages
        longest = self._metrics.longest
        yield _gauge("localkv_longest_text_tokens", "Of a prompt and its answer.", longest)
        yield _gauge("localkv_cache_pages_shared", "Those of several texts.", status.pages_shared)
        yield _gauge("localkv_cache_bytes", "Of K and V.", facts.cache_bytes if facts else 0)
        yield from self._of_disk()
        yield _counter("localkv_preemptions", "Requests that gave way.", self._n("n_preempted"))
        yield _counter("localkv_steps", "Steps of the engine.", self._n("n_steps"))
        restarts = self._supervisor.n_restarts
        yield _counter("localkv_engine_restarts", "Engines that died.", restarts)

    def _of_disk(self) -> Iterator[Metric]:
        """What the prompt cache on the disk has done in this engine, if there is one."""
        disk = self._supervisor.client.status.disk
        if disk is None:
            return
        for name, words, value in (
            ("found_texts", "Texts that went on with rows from the disk.", disk.n_found),
            ("found_tokens", "Tokens whose rows these were.", disk.n_tokens),
            ("read_bytes", "Of files with rows.", disk.bytes_read),
            ("written_bytes", "Of files with rows.", disk.bytes_written),
            ("left_out", "Files and texts that were not written in time.", disk.n_left_out),
            ("damaged", "Files that were damaged, and removed.", disk.n_damaged),
        ):
            yield _counter(f"localkv_cache_disk_{name}", words, value)
        yield _gauge("localkv_cache_disk_bytes", "Of all servers' files.", disk.bytes_now)

    def _n(self, name: str) -> float:
        """A count of this engine and of those before it."""
        value: float = getattr(self._supervisor.total, name)
        return value

    def _vllm(self) -> Iterator[Metric]:
        status, facts, counts = (
            self._supervisor.client.status,
            self._supervisor.facts,
            self._metrics,
        )
        n_pages = facts.n_pages if facts else 0
        used = status.pages_running / n_pages if n_pages else 0.0
        yield _gauge("vllm:num_requests_running", "localkv_requests_running", status.running)
        yield _gauge("vllm:num_requests_waiting", "localkv_requests_waiting", status.waiting)
        yield _gauge("vllm:kv_cache_usage_perc", "1 is all pages of running requests.", used)
        for name, counted in (
            ("prompt_tokens", counts.prefix_asked),
            ("generation_tokens", counts.generated),
            ("prefix_cache_queries", counts.prefix_asked),
            ("prefix_cache_hits", counts.prefix_hit),
            ("spec_decode_num_draft_tokens", counts.drafted),
            ("spec_decode_num_accepted_tokens", counts.accepted),
            ("spec_decode_num_drafts", counts.verified),
        ):
            yield _counter(f"vllm:{name}", _name(counted), _value(counted))
        n_preempted = self._n("n_preempted")
        yield _counter("vllm:num_preemptions", "localkv_preemptions", n_preempted)
        for name, histogram in (
            ("time_to_first_token_seconds", counts.first_token),
            ("inter_token_latency_seconds", counts.next_token),
            ("e2e_request_latency_seconds", counts.request_seconds),
        ):
            yield _renamed(histogram, f"vllm:{name}")

    def _llama(self) -> Iterator[Metric]:
        status, counts = self._supervisor.client.status, self._metrics
        n_steps = self._n("n_steps")
        for name, words, value in (
            ("prompt_tokens", "localkv_prompt_tokens", _value(counts.prompt)),
            ("prompt_tokens_cached", "localkv_prefix_hit_tokens", _value(counts.prefix_hit)),
            ("prompt_seconds", "localkv_prompt_seconds", _value(counts.prompt_seconds)),
            ("tokens_predicted", "localkv_generated_tokens", _value(counts.generated)),
            ("tokens_predicted_seconds", "localkv_decode_seconds", _value(counts.decode_seconds)),
            ("n_decode", "localkv_steps", n_steps),
            ("spec_decode_num_draft_tokens", "localkv_drafted_tokens", _value(counts.drafted)),
            ("spec_decode_num_accepted_tokens", "localkv_accepted_tokens", _value(counts.accepted)),
            ("spec_decode_num_drafts", "localkv_verified_batches", _value(counts.verified)),
        ):
            yield _counter(f"llamacpp:{name}", words, value)
        for name, words, value in (
            ("prompt_tokens_seconds", "Tokens of prompts per second.", self._rate("prompt")),
            ("predicted_tokens_seconds", "Tokens drawn per second.", self._rate("decode")),
            ("requests_processing", "localkv_requests_running", status.running),
            ("n_tokens_max", "localkv_longest_text_tokens", counts.longest),
            ("requests_deferred", "localkv_requests_waiting", status.waiting),
            (
                "n_busy_slots_per_decode",
                "Tokens drawn in a step.",
                _value(counts.generated) / max(1.0, n_steps),
            ),
        ):
            yield _gauge(f"llamacpp:{name}", words, value)

    def _rate(self, of: str) -> float:
        counts = self._metrics
        tokens, seconds = (
            (counts.prompt, counts.prompt_seconds)
            if of == "prompt"
            else (counts.generated, counts.decode_seconds)
        )
        return _value(tokens) / max(1e-9, _value(seconds)) if _value(seconds) else 0.0


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value=float(value))


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(name, words, value=float(value))


def _name(counter: Counter) -> str:
    name: str = next(iter(counter.collect())).name
    return name


def _value(counter: Counter) -> float:
    return float(next(iter(counter.collect())).samples[0].value)


def _renamed(histogram: Histogram, name: str) -> Metric:
    """A copy of a histogram's metric under another name."""
    family = next(iter(histogram.collect()))
    other = Metric(name, family.name, "histogram")
    other.samples = [
        sample._replace(name=name + sample.name.removeprefix(family.name))
        for sample in family.samples
    ]
    return other


class ObservedTexts:
    """Counts the tokens of texts that were submitted together, and notes how they end.

    Args:
        metrics: are told.
        record: of the request.
        n_prompts: tokens of each one's prompt, by its number.
    """

    def __init__(
        self, metrics: Metrics, record: RequestRecord | None, n_prompts: Mapping[int, int]
    ) -> None:
        self._metrics = metrics
        self._record = record or RequestRecord("", "", "")
        self._n_prompts = n_prompts
        self._began = time.perf_counter()
        self._last = dict[int, float]()
        self._n_drawn = dict[int, int]()
        self._n_cached = dict[int, int]()

    def take(self, event: Event) -> None:
        """Something has happened to one of them."""
        if isinstance(event, Reading):
            self._n_cached[event.id] = event.n_cached
        elif isinstance(event, Piece):
            self._drawn(event.id, event.n_tokens)
        elif isinstance(event, Ended):
            self._ended(event)

    def _drawn(self, id: int, n_tokens: int) -> None:
        now, before = time.perf_counter(), self._n_drawn.get(id, 0)
        if n_tokens <= before:
            return
        if id not in self._last:
            self._metrics.first_token.observe(now - self._began)
        else:
            pause = (now - self._last[id]) / (n_tokens - before)
            for _ in range(n_tokens - before):
                self._metrics.next_token.observe(pause)
        self._last[id], self._n_drawn[id] = now, n_tokens
        self._metrics.generated.inc(n_tokens - before)
        self._record.n_generated += n_tokens - before

    def _ended(self, event: Ended) -> None:
        usage, metrics = event.usage, self._metrics
        rest = usage.completion_tokens - self._n_drawn.pop(event.id, 0)
        metrics.generated.inc(max(0, rest))
        self._record.n_generated += max(0, rest)
        self._prompt(event.id, usage.cached_tokens)
        metrics.longest = max(metrics.longest, usage.total_tokens)
        metrics.drafted.inc(usage.drafted_tokens)
        metrics.accepted.inc(usage.accepted_tokens)
        metrics.verified.inc(usage.verified_batches)
        metrics.prompt_seconds.inc(event.timings.prompt_seconds)
        metrics.decode_seconds.inc(event.timings.decode_seconds)
        metrics.request_seconds.observe(time.perf_counter() - self._began)
        metrics.ended.labels("error" if event.error else event.finish_reason).inc()

    def _prompt(self, id: int, n_cached: int) -> None:
        self._n_cached.pop(id, None)
        n_prompt = self._n_prompts[id]
        self._metrics.prefix_asked.inc(n_prompt)
        self._metrics.prefix_hit.inc(n_cached)
        self._metrics.prompt.inc(n_prompt - n_cached)
        self._record.n_prompt += n_prompt
        self._record.n_cached += n_cached

    def broke_off(self, ids: set[int], why: str) -> None:
        """Some end before they are complete: "disconnected", "timeout" or "engine"."""
        for id in ids:
            if id in self._n_cached or id in self._n_drawn:
                self._prompt(id, self._n_cached.get(id, 0))
            self._metrics.ended.labels(why).inc()
            self._record.ended = why
