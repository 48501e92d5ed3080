"""Sounds of a request: files as they are sent, decoded in blocks up to a limit, at the rate that a model hears at."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from hf_paged import needs
from hf_paged.server.errors import bad_field

FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "MP3", "OGG")
BLOCK = 1 << 18  # numbers that are decoded at once
LOUDEST = 1 << 15  # of samples, which should be 1 at most: float32 holds the power of such a sound
RATES = 1_000, 384_000  # samples a second that a file may have
ZEROS = 24  # of the filter's sinc, on each side
ROLL_OFF = 0.945  # of the lower of two rates, up to which frequencies are kept
OUTPUTS = 1 << 11  # samples that are filtered at once


def decoded(file: BinaryIO, rate: int, max_seconds: float) -> np.ndarray:
    """Samples of a file, float32, of one channel, at `rate`.

    Raises:
        ApiError: It is no sound that can be read, has none, or is longer.
    """
    with needs("hf-paged[audio]"):
        import soundfile
    try:
        with soundfile.SoundFile(file) as sound:
            own = sound.samplerate
            if sound.format not in FORMATS:
                raise bad_field("file", f"{sound.format} is not one of {', '.join(FORMATS)}")
            if not RATES[0] <= own <= RATES[1]:
                raise bad_field("file", f"{own} samples a second are not between {RATES[0]} and {RATES[1]}")
            parts = list(resampled(_blocks(sound, max_seconds), own, rate))
    except soundfile.SoundFileError as error:
        raise bad_field("file", f"it is no sound that can be read (wav, flac, mp3, ogg): {error}") from None
    if not parts:
        raise bad_field("file", "there is no sound in it")
    return np.concatenate(parts)


def _blocks(sound: Any, max_seconds: float) -> Iterator[np.ndarray]:
    """The samples of an open file, finite, block by block: a small file may hold gigabytes of silence."""
    left = math.floor(max_seconds * sound.samplerate)
    size = max(BLOCK // sound.channels, 1)
    while len(block := sound.read(size, dtype="float32", always_2d=True)):  # its head may say anything
        left -= len(block)
        if left < 0:
            raise bad_field("file", f"it is longer than the limit of {max_seconds:g} seconds")
        yield np.clip(np.nan_to_num(block.mean(axis=1), posinf=0.0, neginf=0.0), -LOUDEST, LOUDEST)


def resampled(blocks: Iterable[np.ndarray], own: int, rate: int) -> Iterator[np.ndarray]:
    """Blocks of the same sound at another rate: for `[N]` in all, `[ceil(N * rate / own)]`, both float32.

    Each sample is a weighted sum of those around its time; weights are a sinc that ends at `ROLL_OFF` of the lower
    rate's highest frequency, under a Hann window.
    """
    if own == rate:
        yield from blocks
        return
    up, down = rate // math.gcd(own, rate), own // math.gcd(own, rate)
    width = ROLL_OFF * min(1.0, rate / own)
    reach = math.ceil(ZEROS / width)

    def weights(phases: np.ndarray) -> np.ndarray:
        """`[n, 2 * reach]`, of outputs that lie so many `up`ths of a sample behind one."""
        times = width * (np.arange(-reach + 1, reach + 1) - phases[:, None] / up)
        window = np.cos(np.clip(times / ZEROS, -1, 1) * np.pi / 2) ** 2
        return (width * np.sinc(times) * window).astype(np.float32)

    table = weights(np.arange(up)) if up <= OUTPUTS else None  # of odd rates it would be large
    held = np.zeros(reach - 1, np.float32)  # samples from the first on that the next output is made of
    num_read = num_done = first = 0  # `first`: the time of that output, in samples
    for block in itertools.chain(blocks, (None,)):
        if block is None:  # silence behind the sound
            held, end = np.append(held, np.zeros(reach + 1, np.float32)), -(-num_read * up // down)
        else:
            held, num_read = np.append(held, block), num_read + len(block)
            end = -(-(num_read - reach) * up // down)
        for start in range(num_done, end, OUTPUTS):
            places = np.arange(start, min(start + OUTPUTS, end)) * down  # in samples, times `up`
            own_weights = weights(places % up) if table is None else table[places % up]
            windows = sliding_window_view(held, 2 * reach)[places // up - first]
            yield np.einsum("nt,nt->n", windows, own_weights)
        num_done = max(num_done, end)
        held, first = held[num_done * down // up - first :], num_done * down // up


class Ears:
    """Makes the input of a model's encoder out of sounds.

    Attributes:
        rate: Samples a second.
        has_times: The model says when what was said (Whisper).
    """

    def __init__(self, processor: Any, model: Any) -> None:
        self._extract = getattr(processor, "feature_extractor", processor)
        self.rate = int(self._extract.sampling_rate)
        self.has_times = hasattr(model, "generate_with_fallback")
        self._model = model

    def heard(self, samples: np.ndarray) -> dict[str, Any]:
        """Arguments of `submit`."""
        more: dict[str, Any] = {"return_attention_mask": True}
        if self.has_times:  # which takes its segments of whole sounds itself
            is_long = len(samples) > self._extract.n_samples
            more = {"truncation": False, "padding": "longest"} if is_long else {}
        found = self._extract(samples, sampling_rate=self.rate, return_tensors="pt", **more)
        return dict(found.to(self._model.device, self._model.dtype))


def ears_of(model: Any, processor: Any) -> Ears | None:
    """The ears of a model whose encoder reads sounds; `None`: it reads something else.

    Raises:
        ValueError: It has no processor.
    """
    if not model.config.is_encoder_decoder or model.main_input_name not in ("input_features", "input_values"):
        return None
    if processor is None:
        raise ValueError(
            f"{type(model).__name__} hears: give its processor, as create_app(model, tokenizer, processor=...)"
        )
    return Ears(processor, model)
