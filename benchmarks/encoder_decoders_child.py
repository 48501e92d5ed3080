"""One engine of encoder_decoders.py, in an environment of its own: orders as lines of JSON in, figures out.

PYTHON benchmarks/encoder_decoders_child.py ENGINE MODEL_DIR KIND NUM_THREADS

An order: `do` ("batch": all sources at once; "arrivals": each at its time, in seconds; "memory"), `lengths` of the
sources, the `seed` of what they hold, `beams`, `new_tokens` (whatever they are) and `arrivals`. Only the best beam is
returned. Sources are made before the clock starts; encoders run on it. CTranslate2's conversion is kept beside the
model.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from children import answer_orders

FIRST_TOKEN, TEXT_TOKENS = 4, 50000
MELS, FRAMES = 80, 3000
PROMPT = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
MAX_BATCH = 32

Order = dict[str, Any]


def make_sources(kind: str, order: Order) -> list[Any]:
    """Token ids, or the spectrogram of half a minute, of each source."""
    draw = np.random.default_rng(order["seed"])
    if kind == "bart":
        return [draw.integers(FIRST_TOKEN, TEXT_TOKENS, length).tolist() for length in order["lengths"]]
    return [draw.standard_normal((MELS, FRAMES), dtype=np.float32) for _ in order["lengths"]]


class Transformers:
    """Stock `generate()`, one source after the other or all in a padded batch; or hf_paged's."""

    def __init__(self, engine: str, folder: Path, kind: str, num_threads: int) -> None:
        import torch
        from transformers import BartForConditionalGeneration, WhisperForConditionalGeneration

        torch.set_num_threads(num_threads)
        self.torch, self.engine, self.kind = torch, engine, kind
        of_class: Any = BartForConditionalGeneration if kind == "bart" else WhisperForConditionalGeneration
        self.model: Any = of_class.from_pretrained(folder, dtype=torch.float32).eval()
        if engine == "hf_paged":
            import hf_paged

            self.model = hf_paged.patch(self.model, num_blocks=4096)

    def call(self, sources: list[Any], order: Order) -> dict[str, Any]:
        """Arguments of `generate()`."""
        torch = self.torch
        options = {"num_beams": order["beams"], "do_sample": False, "max_new_tokens": order["new_tokens"]}
        if self.kind == "whisper":
            end = self.model.config.eos_token_id
            options |= {"language": "en", "task": "transcribe", "suppress_tokens": [end]}
            return {"input_features": torch.from_numpy(np.stack(sources)), **options}
        width = max(map(len, sources))
        ids = torch.tensor([source + [1] * (width - len(source)) for source in sources])
        return {"input_ids": ids, "attention_mask": (ids != 1).long(), **options}

    def rows(self, sources: list[Any], order: Order) -> list[list[int]]:
        done = self.model.generate(**self.call(sources, order))
        rows: list[list[int]] = done[:, -order["new_tokens"] :].tolist()
        return rows

    def batch(self, sources: list[Any], order: Order) -> list[list[int]]:
        if self.engine == "stock":
            return [row for source in sources for row in self.rows([source], order)]
        return self.rows(sources, order)

    def arrivals(self, sources: list[Any], order: Order) -> list[float]:
        """Each on a thread of its own, from its arrival on."""
        seconds = [0.0] * len(sources)
        started = time.perf_counter() + 0.1

        def user(number: int, arrival: float) -> None:
            time.sleep(max(0.0, started + arrival - time.perf_counter()))
            self.rows([sources[number]], order)
            seconds[number] = time.perf_counter() - started - arrival

        users = [threading.Thread(target=user, args=each) for each in enumerate(order["arrivals"])]
        for thread in users:
            thread.start()
        for thread in users:
            thread.join()
        return seconds

    def memory(self, sources: list[Any], order: Order) -> dict[str, Any]:
        """Bytes of keys and values of a batch, at its end."""
        if self.engine != "hf_paged":
            return self._stock_memory(sources, order)
        engine = self.model.paged
        engine.pause()
        thread = threading.Thread(target=self.rows, args=(sources, order))
        thread.start()
        sequences: list[dict[str, Any]] = []
        used = 0
        while thread.is_alive():
            engine.step()
            snapshot = engine.snapshot()
            found = [sequence for group in snapshot["groups"] for sequence in group["sequences"]]
            held = sum(count > 0 for count in snapshot["blocks"])
            if held >= used:
                used, sequences = held, found
            thread.join(0.001)
        engine.resume()
        thread.join()
        lengths = {tuple(each["source_blocks"]): each["source_tokens"] for each in sequences}
        size = engine.snapshot()["block_size"]
        source = len({block for table in lengths for block in table})
        return {
            "own": (used - source) * engine.bytes_per_block,
            "source": source * engine.bytes_per_block,
            "source_blocks": source,
            "ceilings": sum(math.ceil(tokens / size) for tokens in lengths.values()),
        }

    def _stock_memory(self, sources: list[Any], order: Order) -> dict[str, int]:
        sizes: dict[str, int] = {}

        def look(module: Any, args: Any, arguments: dict[str, Any], output: Any) -> None:
            cache = arguments["past_key_values"]
            for name, part in (("own", cache.self_attention_cache), ("source", cache.cross_attention_cache)):
                sizes[name] = sum(tensor.nbytes for layer in part.layers for tensor in (layer.keys, layer.values))

        hook = self.model.get_decoder().register_forward_hook(look, with_kwargs=True)
        self.rows(sources, order)
        hook.remove()
        return sizes

    def forget(self) -> None:
        """Sources and prefixes of the order before are no help."""
        if self.engine == "hf_paged":
            self.model.paged.reset_prefix_cache()


class CTranslate2:
    """https://github.com/OpenNMT/CTranslate2, through its converter for transformers' models."""

    def __init__(self, folder: Path, kind: str, num_threads: int) -> None:
        import ctranslate2
        from transformers import AutoTokenizer

        self.library, self.kind = ctranslate2, kind
        converted = folder / "ctranslate2"
        if not converted.exists():
            ctranslate2.converters.TransformersConverter(str(folder)).convert(str(converted), quantization="float32")
        settings = {"device": "cpu", "compute_type": "float32", "intra_threads": num_threads, "inter_threads": 1}
        of_class = ctranslate2.Translator if kind == "bart" else ctranslate2.models.Whisper
        self.model: Any = of_class(str(converted), **settings)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.words = tokenizer.convert_ids_to_tokens(list(range(TEXT_TOKENS))) if kind == "bart" else []
        self.ids = tokenizer.get_vocab()
        self.end = tokenizer.eos_token_id

    def batch(self, sources: list[Any], order: Order) -> list[list[int]]:
        new, beams = order["new_tokens"], order["beams"]
        if self.kind == "bart":
            results = self.model.translate_batch(
                [[self.words[token] for token in source] for source in sources],
                beam_size=beams,
                max_batch_size=len(sources),
                max_input_length=0,
                max_decoding_length=new,
                min_decoding_length=new,
            )
            return [[self.ids[word] for word in result.hypotheses[0]] for result in results]
        features = self.library.StorageView.from_array(np.stack(sources))
        results = self.model.generate(
            features,
            [list(PROMPT)] * len(sources),
            beam_size=beams,
            max_length=2 * new,  # of which it generates half at most
            suppress_blank=False,
            suppress_tokens=[self.end],
        )
        return [list(result.sequences_ids[0]) for result in results]

    def arrivals(self, sources: list[Any], order: Order) -> list[float]:
        """What waits is a batch."""
        seconds: list[float] = []
        arrivals: list[float] = order["arrivals"]
        started = time.perf_counter() + 0.1
        while len(seconds) < len(sources):
            first = len(seconds)
            time.sleep(max(0.0, started + arrivals[first] - time.perf_counter()))
            now = time.perf_counter() - started
            waiting = [number for number in range(first, len(sources)) if arrivals[number] <= now][:MAX_BATCH]
            self.batch([sources[number] for number in waiting], order)
            done = time.perf_counter() - started
            seconds += [done - arrivals[number] for number in waiting]
        return seconds

    def forget(self) -> None:
        """It keeps nothing."""


def answer(engine: Any, kind: str, order: Order) -> dict[str, Any]:
    sources = make_sources(kind, order)
    engine.forget()
    if order["do"] == "memory":
        found: dict[str, Any] = engine.memory(sources, order)
        return found
    started = time.perf_counter()
    result = getattr(engine, order["do"])(sources, order)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens" if order["do"] == "batch" else "waits": result}


def main() -> None:
    name, folder, kind, num_threads = sys.argv[1:]
    engine: Any
    if name == "ctranslate2":
        engine = CTranslate2(Path(folder), kind, int(num_threads))
    else:
        engine = Transformers(name, Path(folder), kind, int(num_threads))
    answer_orders(lambda order: answer(engine, kind, order))


if __name__ == "__main__":
    main()
