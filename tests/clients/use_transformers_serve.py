"""`transformers serve`, with all its own code, over a paged model: answers plain, streamed and at once."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.error import URLError
from urllib.request import urlopen

import openai

folder = os.environ["MODEL_FOLDER"]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
command = [sys.executable, "-m", "hf_paged.tools.transformers_serve", folder, "--port", str(port), "--device", "cpu"]
server = subprocess.Popen(command)
client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
settings = {"model": folder, "prompt": "The door", "max_tokens": 20, "temperature": 0}


def stream(_: int) -> str:
    return "".join(chunk.choices[0].text for chunk in client.completions.create(**settings, stream=True))


try:
    while True:
        try:
            urlopen(f"http://127.0.0.1:{port}/health").close()
            break
        except URLError:
            assert server.poll() is None, "the server did not start"
            time.sleep(0.2)
    text = client.completions.create(**settings).choices[0].text
    assert text
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(stream, range(8))) == {text}
finally:
    server.terminate()
    server.wait()
