"""Several users ask about one picture: the first question computes it, and the others find it in the prefix cache.

The model is tiny and random, so that this runs offline in a second: look at the counts, not at the answers.

python examples/pictures.py
"""

import copy
import threading
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import hf_paged

with hf_paged.needs("pillow"):
    from PIL import Image, ImageDraw

TOKENIZER = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
SIDE, PATCH = 64, 8
QUESTIONS = ["What is in the sky?", "Is there a house?", "Which colour is the door?", "Is it day or night?"]


def draw_picture() -> Image.Image:
    """A house under the sun."""
    picture = Image.new("RGB", (SIDE, SIDE), "skyblue")
    draw = ImageDraw.Draw(picture)
    draw.ellipse((44, 4, 58, 18), fill="gold")
    draw.rectangle((0, 48, SIDE, SIDE), fill="seagreen")
    draw.rectangle((14, 30, 40, 54), fill="firebrick")
    draw.polygon([(10, 30), (27, 14), (44, 30)], fill="saddlebrown")
    draw.rectangle((24, 40, 31, 54), fill="white")
    return picture


def to_pixels(picture: Image.Image) -> torch.Tensor:
    """As an image processor of transformers makes them: `[1, 3, height, width]`, around 0."""
    values = np.asarray(picture, dtype=np.float32) / 127.5 - 1
    return torch.from_numpy(values).permute(2, 0, 1)[None]


def make_model(vocab_size: int) -> LlavaForConditionalGeneration:
    """A LLaVA with a vision tower and a language model of two layers each; its last token id stands for a picture."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config=LlamaConfig(vocab_size=vocab_size + 1, **shape),
        vision_config=CLIPVisionConfig(image_size=SIDE, patch_size=PATCH, **shape),
        image_token_index=vocab_size,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config).eval()


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    stock = make_model(len(tokenizer))
    model = hf_paged.patch(copy.deepcopy(stock))
    pixels = to_pixels(draw_picture())
    picture = [len(tokenizer)] * (SIDE // PATCH) ** 2

    def ask(of: LlavaForConditionalGeneration, question: str) -> torch.Tensor:
        ids = torch.tensor([tokenizer("A picture: ")["input_ids"] + picture + tokenizer(question)["input_ids"]])
        return of.generate(input_ids=ids, pixel_values=pixels, max_new_tokens=16, do_sample=False, eos_token_id=None)

    answers = {QUESTIONS[0]: ask(model, QUESTIONS[0])}
    before = model.paged.stats()

    def run(question: str) -> None:
        answers[question] = ask(model, question)

    threads = [threading.Thread(target=run, args=(question,)) for question in QUESTIONS[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    stats = model.paged.stats()
    found = stats.prefix_cache_hit_tokens - before.prefix_cache_hit_tokens
    print(f"a picture is {len(picture)} tokens; {len(threads)} more users found {found} tokens in the cache")
    print(f"{len(threads)} answers in {stats.num_steps - before.num_steps} model steps")
    same = all(torch.equal(ask(stock, question), answers[question]) for question in QUESTIONS)
    print(f"same tokens as stock generate(): {same}")


if __name__ == "__main__":
    main()
