"""guidellm: a benchmark of completions, and one of chats, two requests at a time, all of which have to succeed."""

import json
import os
import subprocess
from pathlib import Path

NUM_REQUESTS, LENGTH = 6, 16
target, key = os.environ["BASE_URL"].removesuffix("/v1"), os.environ["OPENAI_API_KEY"]
report = Path("report.json")
for path in ("/v1/completions", "/v1/chat/completions"):
    options = {
        "backend": f"kind=openai_http,target={target},model={os.environ['MODEL']},request_format={path},api_key={key}",
        "profile": "kind=concurrent,streams=2",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={os.environ['MODEL_FOLDER']}",
        "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={LENGTH}",
        "output": f"kind=json,path={report}",
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    subprocess.run(["guidellm", "run", *given, "--disable-console-interactive"], check=True)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == NUM_REQUESTS, benchmark["metrics"]
    counts = benchmark["metrics"]["output_token_count"]["successful"]
    assert counts["min"] == counts["max"] == LENGTH
