"""An urgent request overtakes all that wait, though it came last. Here a person makes the steps, one at a time.

python examples/priorities.py
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
WORDS = ["door", "house", "sea", "king", "girl", "night"]


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(TINY_MODEL), num_blocks=256, max_num_seqs=2)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}

    model.paged.pause()  # until resume(): steps run only when step() is called
    requests = {word: model.paged.submit(tokenizer(f"The {word}")["input_ids"], **options) for word in WORDS}
    for _ in range(3):
        model.paged.step()
    urgent = tokenizer("The captain")["input_ids"]
    requests["captain (urgent)"] = model.paged.submit(urgent, priority=-1, **options)  # the lower, the earlier

    finished: list[str] = []
    while len(finished) < len(requests):
        model.paged.step()
        for name, request in requests.items():
            if request.is_done and name not in finished:
                finished.append(name)
                number = model.paged.stats().num_steps
                print(f"step {number:2}: {name} ->{tokenizer.decode(request.result().token_ids)!r}")
    model.paged.resume()
    print(f"\nfinished in this order: {', '.join(finished)}")


if __name__ == "__main__":
    main()
