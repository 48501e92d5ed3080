"""`vllm bench serve`, called as that command calls it: completions and chats, streamed, which all have to succeed.

The command itself looks for a package named vllm, and does not start in the one that is built for CPUs.
"""

import os

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

NUM_PROMPTS, LENGTH = 8, 16
parser = FlexibleArgumentParser()
add_cli_args(parser)
for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    options = {
        "backend": backend,
        "base-url": os.environ["BASE_URL"].removesuffix("/v1"),
        "endpoint": endpoint,
        "model": os.environ["MODEL"],
        "tokenizer": os.environ["MODEL_FOLDER"],
        "dataset-name": "random",
        "random-input-len": 32,
        "random-output-len": LENGTH,
        "num-prompts": NUM_PROMPTS,
    }
    result = main(parser.parse_args([*(f"--{name}={value}" for name, value in options.items()), "--ignore-eos"]))
    assert result["completed"] == NUM_PROMPTS and result["total_output_tokens"] == NUM_PROMPTS * LENGTH, result
    assert result["mean_ttft_ms"] > 0 and result["mean_itl_ms"] > 0
