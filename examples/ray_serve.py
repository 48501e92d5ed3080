"""Replicas of a model under Ray Serve, routed by the beginning of the prompt, so that prefix caches hit.

    pip install "hf-paged[ray]"
    python examples/ray_serve.py             # two replicas, 200 requests with 20 shared prefixes; prints hit rates
    python examples/ray_serve.py --serve     # curl -d '{"prompt": "The door"}' http://127.0.0.1:8000/

Ray starts, watches and restarts the replicas, on one machine or many; each has an engine, a pool and a prefix cache of
its own. A request's first tokens choose its replica (by consistent hashing; the next one takes over when it is
full). So requests that begin alike find the blocks that the first of them has filled.
"""

import argparse
import hashlib
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

with hf_paged.needs("hf-paged[ray]"):
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

TINY_MODEL = str(Path(hf_paged.__file__).parent / "assets" / "tiny_lm")
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
BLOCK_SIZE = 16
PREFIX = 2 * BLOCK_SIZE  # tokens that say where a request goes: long enough to differ, shorter than what is shared
NUM_PREFIXES, NUM_REQUESTS = 20, 200


def load(name: str, num_blocks: int | None) -> Any:
    return hf_paged.patch(AutoModelForCausalLM.from_pretrained(name), block_size=BLOCK_SIZE, num_blocks=num_blocks)


@serve.deployment(request_router_config=RequestRouterConfig(request_router_class=ROUTER), max_ongoing_requests=256)
class Replica:
    """One engine; all requests that are here share its steps."""

    def __init__(self, name: str, num_blocks: int | None) -> None:
        self._model = load(name, num_blocks)
        self._id = serve.get_replica_context().replica_id.unique_id

    async def generate(self, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        request = self._model.paged.submit(ids, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)
        try:
            tokens = [token async for token in request]
        finally:
            request.cancel()  # the caller went away: its blocks are free within a step
        stats = self._model.paged.stats()
        counts = stats.prefix_cache_hit_tokens, stats.prefix_cache_query_tokens
        return {"replica": self._id, "token_ids": tokens, "counts": counts}


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Front:
    """Text to tokens and back, and where a request goes."""

    def __init__(self, name: str, replicas: Any) -> None:
        self._tokenizer, self._replicas = AutoTokenizer.from_pretrained(name), replicas

    async def __call__(self, request: Any) -> dict[str, Any]:
        body = json.loads(await request.body())
        answer = await self.generate(self._tokenizer(body["prompt"])["input_ids"], body.get("max_new_tokens", 32))
        return {"text": self._tokenizer.decode(answer["token_ids"]), "replica": answer["replica"]}

    async def generate(self, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        key = hashlib.sha256(json.dumps(ids[:PREFIX]).encode()).hexdigest()
        answer: dict[str, Any] = await self._replicas.options(session_id=key).generate.remote(ids, max_new_tokens)
        return answer


def build(name: str, num_replicas: int, num_blocks: int | None) -> Any:
    """The application."""
    needs = {"num_gpus": 1} if torch.cuda.is_available() else {"num_cpus": 0.5}
    replicas = Replica.options(num_replicas=num_replicas, ray_actor_options=needs).bind(name, num_blocks)  # type: ignore[attr-defined]
    return Front.bind(name, replicas)  # type: ignore[attr-defined]


def requests() -> list[list[int]]:
    """Prompts with a prefix that ten of them share, and an end of their own."""
    draw = random.Random(0)
    prefixes = [[draw.randrange(5, 400) for _ in range(6 * BLOCK_SIZE)] for _ in range(NUM_PREFIXES)]
    return [prefixes[n % NUM_PREFIXES] + [draw.randrange(5, 400) for _ in range(24)] for n in range(NUM_REQUESTS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=TINY_MODEL)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--num-blocks", type=int, default=512, help="of each replica's pool")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--serve", action="store_true", help="serve HTTP until it is ended")
    arguments = parser.parse_args()

    # A cluster's address comes from RAY_ADDRESS; without it Ray starts here.
    ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="EveryNode" if arguments.serve else "Disabled")
    app = build(arguments.model, arguments.replicas, arguments.num_blocks)
    front = serve.run(app)
    if arguments.serve:
        print("serving on http://127.0.0.1:8000/", flush=True)
        while True:
            time.sleep(3600)

    prompts = requests()
    with ThreadPoolExecutor(arguments.clients) as clients:
        answers = list(clients.map(lambda ids: front.generate.remote(ids, 8).result(), prompts))
    counts: dict[str, tuple[int, int]] = {}  # of each replica, tokens found and asked for: they only grow
    for answer in answers:
        counts[answer["replica"]] = max(counts.get(answer["replica"], (0, 0)), tuple(answer["counts"]))
    serve.shutdown()
    ray.shutdown()

    one = load(arguments.model, arguments.replicas * arguments.num_blocks)
    with ThreadPoolExecutor(arguments.clients) as clients:
        submit = one.paged.submit
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        tokens = list(clients.map(lambda ids: submit(ids, **options).result().token_ids, prompts))
    stats = one.paged.stats()
    hits, asked = (sum(count[place] for count in counts.values()) for place in (0, 1))
    print(f"{len(answers)} requests on {len(counts)} replicas")
    print(f"same tokens as one engine: {tokens == [answer['token_ids'] for answer in answers]}")
    print(f"prefix hits of the replicas: {100 * hits / asked:.1f} %")
    print(f"prefix hits of one engine: {100 * stats.prefix_cache_hit_tokens / stats.prefix_cache_query_tokens:.1f} %")


if __name__ == "__main__":
    main()
