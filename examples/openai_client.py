"""OpenAI's client against the server, both in this process: replies share steps, and one follows a JSON schema.

    python examples/openai_client.py

Needs the extra: pip install "hf-paged[server]". A server of its own: python -m hf_paged serve
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

with hf_paged.needs("hf-paged[server]"):
    import uvicorn
    from openai import OpenAI

TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main() -> None:
    model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(TINY_MODEL))
    app = hf_paged.server.create_app(model, AutoTokenizer.from_pretrained(TINY_MODEL), model_name="tiny")
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")

    def stream(word: str) -> str:
        chunks = client.completions.create(
            model="tiny", prompt=f"The {word}", max_tokens=32, temperature=0, stream=True
        )
        return f"The {word}" + "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor() as pool:
        print(*pool.map(stream, ["door", "sea", "king", "night"]), sep="\n---\n")
    counts = model.paged.stats()
    print(f"\n{counts.num_generated_tokens} tokens in {counts.num_steps} model steps")

    reply = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Who are you?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        max_tokens=60,
        seed=1,
    )
    print("a person:", json.loads(reply.choices[0].message.content or ""))
    client.close()
    server.should_exit = True
    thread.join()


if __name__ == "__main__":
    main()
