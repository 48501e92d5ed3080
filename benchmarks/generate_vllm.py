"""The vLLM side of generate.py, in vLLM's own environment: one line of JSON in, one out, with tokens and seconds.

VENV/bin/python benchmarks/generate_vllm.py MODEL_DIR DTYPE MAX_NUM_SEQS MAX_MODEL_LEN PREFIX_CACHING [BLOCKS SIZE]

An order with arrivals is answered with the seconds at which each of a request's tokens was there.
"""

import json
import resource
import sys
import time

MARK = "RESULT "


def main() -> None:
    from vllm import LLM, SamplingParams

    folder, dtype, max_num_seqs, max_model_len, prefix_caching, *pool = sys.argv[1:]
    limits = {"num_gpu_blocks_override": int(pool[0]), "block_size": int(pool[1])} if pool else {}
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=int(max_model_len),
        max_num_seqs=int(max_num_seqs),
        enforce_eager=True,
        enable_prefix_caching=prefix_caching == "1",
        seed=0,
        **limits,
    )
    print(MARK + json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        options = order["options"]
        if not options.pop("do_sample", False):
            options["temperature"] = 0.0
        params = [
            SamplingParams(max_tokens=num_new, ignore_eos=True, detokenize=False, **options)
            for _, num_new in order["requests"]
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in order["requests"]]
        llm.reset_prefix_cache()
        if "arrivals" in order:
            times = serve(llm.llm_engine, prompts, params, order["arrivals"])
            print(MARK + json.dumps({"times": times}), flush=True)
            continue
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        result = {
            "seconds": time.perf_counter() - started,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        print(MARK + json.dumps(result), flush=True)


def serve(engine, prompts: list, params: list, arrivals: list[float]) -> list[list[float]]:
    """When each request's tokens were there, in seconds, requests handed in at their arrivals."""
    times: list[list[float]] = [[] for _ in prompts]
    submitted, started = 0, time.perf_counter()
    while submitted < len(prompts) or engine.has_unfinished_requests():
        now = time.perf_counter() - started
        while submitted < len(prompts) and arrivals[submitted] <= now:
            engine.add_request(str(submitted), prompts[submitted], params[submitted])
            submitted += 1
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, arrivals[submitted] - now))
            continue
        outputs = engine.step()
        now = time.perf_counter() - started
        for output in outputs:
            row = times[int(output.request_id)]
            row += [now] * (len(output.outputs[0].token_ids) - len(row))
    return times


if __name__ == "__main__":
    main()
