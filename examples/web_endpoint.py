"""An async web endpoint over the engine: every request streams, all of them share one continuous batch.

    python examples/web_endpoint.py            # starts a server and eight clients, and ends
    python examples/web_endpoint.py --serve    # curl -N "http://127.0.0.1:8000/generate?prompt=The+door"

Needs fastapi and uvicorn: pip install "hf-paged[server]"
"""

import argparse
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

with hf_paged.needs("hf-paged[server]"):
    import uvicorn
    from fastapi import FastAPI, HTTPException
    from fastapi.responses import StreamingResponse

TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
WORDS = ["door", "house", "sea", "king", "girl", "night", "letter", "captain"]  # a client each

tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(TINY_MODEL), max_waiting=64)
app = FastAPI()


@app.get("/generate")
async def generate(prompt: str, max_new_tokens: int = 32) -> StreamingResponse:
    """The text that follows `prompt`, as it is generated."""
    try:
        request = model.paged.submit(
            tokenizer(prompt)["input_ids"], max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
        )
    except ValueError as error:  # an empty prompt, one that could never fit, a bad argument
        raise HTTPException(400, str(error)) from error
    except hf_paged.QueueFullError as error:
        raise HTTPException(503, str(error)) from error

    async def pieces() -> AsyncIterator[str]:
        try:
            async for token_id in request:
                yield tokenizer.decode([token_id])
        finally:
            request.cancel()  # the client went away: its blocks are free within a step

    return StreamingResponse(pieces(), media_type="text/plain")


@app.get("/stats")
async def stats() -> dict[str, object]:
    """Queues and pool at this moment."""
    picture = model.paged.snapshot()
    return {name: picture.get(name) for name in ("num_blocks", "running", "waiting", "swapped")}


def ask(port: int, prompt: str, replies: list[str]) -> None:
    """One client."""
    url = f"http://127.0.0.1:{port}/generate?" + urllib.parse.urlencode({"prompt": prompt})
    with urllib.request.urlopen(url, timeout=60) as response:
        replies.append(prompt + response.read().decode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="until Ctrl-C, instead of eight clients")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    arguments = parser.parse_args()
    if arguments.serve:
        uvicorn.run(app, host="127.0.0.1", port=arguments.port)
        return

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=arguments.port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    replies: list[str] = []
    clients = [threading.Thread(target=ask, args=(port, f"The {word}", replies)) for word in WORDS]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    server.should_exit = True
    thread.join()
    print(*replies, sep="\n---\n")
    counts = model.paged.stats()
    print(f"\n{len(replies)} replies, {counts.num_generated_tokens} tokens in {counts.num_steps} model steps")


if __name__ == "__main__":
    main()
