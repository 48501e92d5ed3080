"""The vLLM side of generate.py, in vLLM's own environment: one line of JSON in, one out, with tokens and seconds.

VENV/bin/python benchmarks/generate_vllm.py MODEL_DIR DTYPE MAX_NUM_SEQS MAX_MODEL_LEN PREFIX_CACHING
"""

import json
import sys
import time

MARK = "RESULT "


def main() -> None:
    from vllm import LLM, SamplingParams

    folder, dtype, max_num_seqs, max_model_len, prefix_caching = sys.argv[1:]
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=int(max_model_len),
        max_num_seqs=int(max_num_seqs),
        enforce_eager=True,
        enable_prefix_caching=prefix_caching == "1",
        seed=0,
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
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        result = {
            "seconds": time.perf_counter() - started,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        }
        print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
