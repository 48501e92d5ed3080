"""Prometheus metrics, under vLLM's names where they mean the same."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hf_paged import Engine
from hf_paged.server.generation import Generation

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ["model_name"]
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
LONG = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)


class Metrics:
    """The counters of a server, and those of its engine, read when they are asked for."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        """A registry of its own: several servers may run in a process."""
        self._registry = registry = CollectorRegistry()
        self._name = model_name
        registry.register(_EngineMetrics(engine, model_name))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, LABELS, registry=registry, buckets=buckets)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, [*LABELS, *labels], registry=registry)

        self.first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first text", SHORT)
        self.between = histogram("vllm:inter_token_latency_seconds", "Mean time between a request's tokens", SHORT)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end", LONG)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts")
        self.new_tokens = counter("vllm:generation_tokens", "Tokens generated")
        self.succeeded = counter("vllm:request_success", "Texts that ended, by reason", "finished_reason")
        self.answers = counter("hf_paged:http_responses", "Answers, by path and status", "path", "status")

    def note_end(self, generation: Generation, now: float, name: str) -> None:
        """Books a generation that has ended by itself, under the name that its model was asked for by."""
        started, first = generation.arrival_time, generation.first_token_time
        self.whole.labels(name).observe(now - started)
        if first is not None:
            self.first_token.labels(name).observe(first - started)
            if (longest := max(text.num_tokens for text in generation.texts)) > 1:
                self.between.labels(name).observe((now - first) / (longest - 1))
        self.prompt_tokens.labels(name).inc(generation.num_prompt_tokens)
        self.new_tokens.labels(name).inc(generation.num_tokens)
        for reason, count in collections.Counter(text.finish_reason for text in generation.texts).items():
            self.succeeded.labels(name, reason).inc(count)

    def note_answer(self, path: str, status: int) -> None:
        self.answers.labels(self._name, path, str(status)).inc()

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)


class _EngineMetrics(Collector):
    """The engine's own counters."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._name = model_name

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        used = stats.num_blocks - stats.num_free_blocks
        usage, looked_up = used / max(stats.num_blocks, 1), stats.prefix_cache_query_tokens
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for kind, name, text, value in (
            (
                gauge,
                "vllm:num_requests_running",
                "Sequences of calls with keys and values in the pool",
                stats.num_running,
            ),
            (gauge, "vllm:num_requests_waiting", "Requests without blocks", stats.num_waiting),
            (gauge, "vllm:kv_cache_usage_perc", "Share of the pool's blocks in use, 0 to 1", usage),
            (counter, "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache", looked_up),
            (counter, "vllm:prefix_cache_hits", "Tokens found there", stats.prefix_cache_hit_tokens),
            (counter, "vllm:num_preemptions", "Preemptions", stats.num_preemptions),
            (counter, "hf_paged:steps", "Model steps", stats.num_steps),
            (counter, "hf_paged:replayed_steps", "Model steps that replayed a CUDA graph", stats.num_replayed_steps),
            (counter, "hf_paged:blocks_allocated", "Blocks that sequences took", stats.num_blocks_allocated),
            (counter, "hf_paged:cow_copies", "Blocks copied because they were shared", stats.num_cow_copies),
        ):
            metric = kind(name, text, labels=LABELS)
            metric.add_metric([self._name], float(value))
            yield metric
