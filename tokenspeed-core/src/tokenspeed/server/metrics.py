"""Prometheus metrics: the engine's own counters at each scrape, and what the HTTP process measures of every request.

Names are `tokenspeed:` and vLLM's suffixes; with `compat` the same series appear once more under another prefix
(`vllm`), so that existing dashboards work.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenspeed.engine.request import TokenUpdate

if TYPE_CHECKING:
    from tokenspeed.server.generation import Generation, Sample

PREFIX = "tokenspeed"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_TOKENS = tuple(2**i for i in range(18))
_SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

_GAUGES = {
    "num_requests_running": ("running", "Samples in the running batch."),
    "num_requests_waiting": ("waiting", "Samples that wait for a seat or for pages."),
    "kv_pages_total": ("pages_total", "Pages of 16 tokens in the KV cache."),
    "kv_pages_used": ("pages_used", "Pages that running samples hold."),
    "kv_pages_cached": ("pages_idle", "Pages that only the prefix cache holds."),
}
_COUNTERS = {
    "num_preemptions": ("preemptions", "Samples sent back to the queue for want of pages."),
    "prefix_cache_hits": ("cached_tokens", "Prompt tokens taken from the prefix cache."),
    "engine_steps": ("steps", "Forward passes."),
    "chunked_prefills": ("chunked_prefills", "Prefill chunks that did not finish their prompt."),
    "engine_step_seconds": ("step_seconds", "Seconds spent in steps."),
    "engine_operator_seconds": ("operator_seconds", "Seconds spent in the model and sampling operators."),
}


class _EngineCollector(Collector):
    """The engine's last statistics as metric families."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._names, self._values = list(labels), list(labels.values())
        self.stats: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        for name, (key, help_) in _GAUGES.items():
            yield self._family(GaugeMetricFamily, name, help_, self.stats.get(key, 0))
        for name, (key, help_) in _COUNTERS.items():
            yield self._family(CounterMetricFamily, name, help_, self.stats.get(key, 0))
        used = self.stats.get("pages_used", 0) / max(self.stats.get("pages_total", 0), 1)
        yield self._family(GaugeMetricFamily, "kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.", used)
        computed = self.stats.get("prompt_tokens", 0) + self.stats.get("cached_tokens", 0)
        help_ = "Prompt tokens that were looked up or computed."
        yield self._family(CounterMetricFamily, "prefix_cache_queries", help_, computed)

    def _family(self, kind: Any, name: str, help_: str, value: float) -> Metric:
        family: Metric = kind(f"{PREFIX}:{name}", help_, labels=self._names)
        family.add_metric(self._values, value)  # type: ignore[attr-defined]
        return family


class Metrics:
    """All series of one server. `compat` lists further prefixes.

    `numerics` becomes the labels of `numerics_info`, a series that is always 1: the fingerprint and the envelope.
    """

    def __init__(
        self, model_name: str, *, numerics: Mapping[str, str] = MappingProxyType({}), compat: Sequence[str] = ()
    ) -> None:
        labels = {"model_name": model_name, "engine": "0"}
        self._labels = labels
        self._compat = tuple(compat)
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(labels)
        self._registry.register(self._engine)
        self._numerics = Gauge(
            f"{PREFIX}:numerics_info",
            "What determines the bits of the replies.",
            [*labels, *numerics],
            registry=self._registry,
        )
        self.numerics_changed(numerics)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens received.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            f"{PREFIX}:request_success",
            "Samples by how they ended.",
            [*labels, "finished_reason"],
            registry=self._registry,
        )
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _LATENCY_SECONDS)
        self._inter_token = self._histogram("inter_token_latency_seconds", "Between two tokens.", _TOKEN_SECONDS)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time of a token after the first.", _TOKEN_SECONDS
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _LATENCY_SECONDS)
        self._prompt_size = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._output_size = self._histogram("request_generation_tokens", "Tokens of an output.", _TOKENS)
        self._n = self._histogram("request_params_n", "`n` of a request.", _SAMPLES)
        self._max_tokens = self._histogram("request_params_max_tokens", "`max_tokens` of a request.", _TOKENS)
        self._http = Counter(
            "http_requests", "HTTP requests.", ["method", "handler", "status"], registry=self._registry
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "HTTP requests, until the reply was complete.",
            ["method", "handler"],
            buckets=_LATENCY_SECONDS,
            registry=self._registry,
        )

    def numerics_changed(self, numerics: Mapping[str, str]) -> None:
        """The labels of `numerics_info` have these values from now on."""
        self._numerics.clear()
        self._numerics.labels(*self._labels.values(), *numerics.values()).set(1)

    def started(self, generation: Generation) -> None:
        """A request was handed to the engine."""
        for job in generation.jobs:
            self._n.observe(job.params.n)
            if job.params.max_tokens is not None:
                self._max_tokens.observe(job.params.max_tokens)
            self._prompt_tokens.inc(len(job.prompt.ids))
            self._prompt_size.observe(len(job.prompt.ids))

    def observe(self, generation: Generation, sample: Sample, update: TokenUpdate) -> None:
        """A sample, already updated, got `update`."""
        now = time.monotonic()
        if update.token_ids:
            count = len(update.token_ids)
            self._generation_tokens.inc(count)
            if sample.first_token_at == 0:
                sample.first_token_at = now
                self._first_token.observe(now - generation.started_at)
            else:
                for _ in range(count):
                    self._inter_token.observe((now - sample.last_token_at) / count)
            sample.last_token_at = now
        if update.finish_reason is not None:
            self._success.labels(*self._labels.values(), update.finish_reason).inc()
            self._whole.observe(now - generation.started_at)
            self._output_size.observe(len(sample.token_ids))
            if len(sample.token_ids) > 1:
                self._per_token.observe((now - sample.first_token_at) / (len(sample.token_ids) - 1))

    def ended(self, generation: Generation, unfinished: str) -> None:
        """A request is over. Samples that failed are counted, and those whose client has gone, as `unfinished`."""
        for sample in generation.samples:
            if sample.finish_reason in (None, "error"):
                self._success.labels(*self._labels.values(), sample.finish_reason or unfinished).inc()

    def http(self, method: str, handler: str, status: int, seconds: float) -> None:
        """An HTTP request was answered; `status` is grouped as `2xx`."""
        self._http.labels(method, handler, f"{status // 100}xx").inc()
        self._http_seconds.labels(method, handler).observe(seconds)

    def render(self, stats: Mapping[str, Any]) -> bytes:
        """The text that Prometheus scrapes; `stats` are the engine's, empty when it is dead."""
        self._engine.stats = stats
        text: bytes = generate_latest(self._registry)
        ours = f"{PREFIX}:".encode()
        return text + b"".join(_renamed(text, ours, f"{prefix}:".encode()) for prefix in self._compat)

    def _counter(self, name: str, help_: str) -> Counter:
        return Counter(f"{PREFIX}:{name}", help_, list(self._labels), registry=self._registry).labels(
            *self._labels.values()
        )

    def _histogram(self, name: str, help_: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(
            f"{PREFIX}:{name}", help_, list(self._labels), buckets=tuple(buckets), registry=self._registry
        )
        return family.labels(*self._labels.values())


def _renamed(text: bytes, ours: bytes, theirs: bytes) -> bytes:
    """The lines of `text` that are about our series, under another prefix."""
    starts = (ours, b"# HELP " + ours, b"# TYPE " + ours)
    lines = [line.replace(ours, theirs, 1) for line in text.splitlines(keepends=True) if line.startswith(starts)]
    return b"".join(lines)
