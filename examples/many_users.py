"""Many users at once, each a thread with a streamer: transformers' own pattern, untouched, in one continuous batch.

python examples/many_users.py
"""

import time
from pathlib import Path
from threading import Thread
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import hf_paged

TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
NUM_USERS = 8
PROMPTS = [
    "It was late in the evening when",
    "The door opened, and",
    "Nobody had seen the letter before",
    "To be honest with you, said the captain,",
]


def answer(model: Any, tokenizer: Any, prompt: str, replies: dict[int, str], user: int) -> None:
    """What a web handler would do for one user: generate on a thread, forward the text piece by piece."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    arguments = dict(**tokenizer(prompt, return_tensors="pt"), streamer=streamer, max_new_tokens=48, do_sample=False)
    thread = Thread(target=model.generate, kwargs=arguments)
    thread.start()
    replies[user] = "".join(streamer)
    thread.join()


def serve(model: Any, tokenizer: Any) -> tuple[dict[int, str], float]:
    """All users at once; their replies and the seconds it took."""
    replies: dict[int, str] = {}
    users = [
        Thread(target=answer, args=(model, tokenizer, PROMPTS[user % len(PROMPTS)], replies, user))
        for user in range(NUM_USERS)
    ]
    started = time.perf_counter()
    for user in users:
        user.start()
    for user in users:
        user.join()
    return replies, time.perf_counter() - started


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    expected, stock_seconds = serve(model, tokenizer)

    model = hf_paged.patch(model)  # the one line

    replies, seconds = serve(model, tokenizer)
    for user in range(3):
        print(f"user {user}: {PROMPTS[user % len(PROMPTS)]}{replies[user]!r}")
    stats = model.paged.stats()
    print(f"\nsame replies as stock: {replies == expected}")
    print(f"{NUM_USERS} users, {stats.num_generated_tokens} tokens in {stats.num_steps} model steps")
    print(f"seconds: {seconds:.2f}, stock in threads: {stock_seconds:.2f}")


if __name__ == "__main__":
    main()
