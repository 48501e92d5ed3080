"""Speech: a Whisper that hears melodies. Each is stored once, however many users and beams read it.

The model has one layer each and is trained on the spot, in seconds, to write down notes that are made on the spot, too.

python examples/transcribe.py
"""

import copy
import threading
import time
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

import hf_paged

PITCHES = {"C": 523.3, "D": 587.3, "E": 659.3, "F": 698.5, "G": 784.0, "A": 880.0, "B": 987.8}  # Hz
NAMES = list(PITCHES)
RATE, SECONDS, NOTE, PAUSE = 16000, 2, 0.2, 0.04
BINS, HOP = 32, 320  # of the spectrogram
FRAMES = SECONDS * RATE // HOP
POSITIONS = FRAMES // 2  # what the encoder makes of two seconds
PER_NOTE = POSITIONS * (NOTE + PAUSE) / SECONDS
PAD, START, END, FIRST = 0, 1, 2, 3  # token ids; from `FIRST` on they are notes
TUNES = {"alphabet": "CDEFGAB", "brother": "CDECCDEC", "joy": "EEFGGFED", "siren": "AEAEAEA"}
USERS = 6  # of each tune
OPTIONS = {"num_beams": 4, "do_sample": False, "max_new_tokens": 12}


def play(notes: str, noise: np.random.Generator) -> np.ndarray:
    """A melody as samples, float32."""
    time_of_note = np.arange(round(NOTE * RATE)) / RATE
    fade = np.minimum(1, np.minimum(time_of_note, time_of_note[::-1]) / 0.01) * np.exp(-3 * time_of_note)
    rest = np.zeros(round(PAUSE * RATE))
    pieces = []
    for note in notes:
        wave = 2 * np.pi * PITCHES[note] * time_of_note
        pieces += [(np.sin(wave) + 0.3 * np.sin(2 * wave)) * fade, rest]
    sound = np.concatenate(pieces)
    return (sound + 0.01 * noise.standard_normal(len(sound))).astype(np.float32)


def hear(sounds: list[np.ndarray]) -> torch.Tensor:
    """As Whisper's own feature extractor makes them: `[sounds, BINS, FRAMES]`."""
    extractor = WhisperFeatureExtractor(feature_size=BINS, chunk_length=SECONDS, hop_length=HOP, n_fft=800)
    return extractor(sounds, sampling_rate=RATE, return_tensors="pt").input_features


def decode(ids: torch.Tensor) -> str:
    return " ".join(NAMES[token - FIRST] for token in ids.tolist() if token >= FIRST)


def make_model(steps: int = 200) -> WhisperForConditionalGeneration:
    """A Whisper, trained on random melodies."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # it is too small for more
    sides = ("encoder", "decoder")
    shape = {f"{side}_layers": 1 for side in sides} | {f"{side}_attention_heads": 4 for side in sides}
    shape |= {f"{side}_ffn_dim": 128 for side in sides} | {"d_model": 64, "num_mel_bins": BINS, "init_std": 0.1}
    lengths = {"max_source_positions": POSITIONS, "max_target_positions": 32}
    special = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END, "decoder_start_token_id": START}
    none = {"suppress_tokens": None, "begin_suppress_tokens": None}
    config = WhisperConfig(vocab_size=FIRST + len(NAMES), **shape, **lengths, **special, **none)
    model = WhisperForConditionalGeneration(config).train()
    with torch.no_grad():  # the third note is at the third place: it need not learn that
        places = [min(POSITIONS - 1, round((note + 0.5) * PER_NOTE)) for note in range(9)]
        model.model.decoder.embed_positions.weight[:9] = model.model.encoder.embed_positions.weight[places]
    draw = np.random.default_rng(0)
    melodies = ["".join(draw.choice(NAMES, draw.integers(3, 9))) for _ in range(480)]
    features = hear([play(melody, draw) for melody in melodies])
    targets = [torch.tensor([*(FIRST + NAMES.index(note) for note in melody), END]) for melody in melodies]
    labels = pad_sequence(targets, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        rows = torch.randint(0, len(melodies), (16,))
        model(input_features=features[rows], labels=labels[rows]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def main() -> None:
    started = time.perf_counter()
    stock = make_model()
    print(f"trained in {time.perf_counter() - started:.0f} s\n")
    model: Any = hf_paged.patch(copy.deepcopy(stock), num_blocks=512)
    engine = model.paged

    noise = np.random.default_rng(1)
    sounds = {name: hear([play(notes, noise)]) for name, notes in TUNES.items()}
    answers: dict[tuple[str, int], torch.Tensor] = {}

    def transcribe(name: str, user: int) -> None:
        answers[name, user] = model.generate(input_features=sounds[name], **OPTIONS)

    engine.pause()  # only to look at it
    users = [threading.Thread(target=transcribe, args=(name, user)) for name in TUNES for user in range(USERS)]
    for thread in users:
        thread.start()
    while engine.stats().num_waiting < len(users):
        time.sleep(0.01)
    for _ in range(4):
        engine.step()
    sequences = [sequence for group in engine.snapshot()["groups"] for sequence in group["sequences"]]
    tables = [sequence["source_blocks"] for sequence in sequences]
    distinct = {block for table in tables for block in table}
    print(f"{len(users)} users, {len(TUNES)} recordings, a source of {sequences[0]['source_tokens']} positions each")
    print(f"{len(sequences)} sequences, source blocks: {len(distinct)}, without sharing: {sum(map(len, tables))}")
    engine.resume()
    for thread in users:
        thread.join()
    tokens = sum(int((answer >= FIRST).sum()) for answer in answers.values())
    print(f"{tokens} notes in {engine.stats().num_steps} model steps\n")

    for name, notes in TUNES.items():
        print(f"{name:>8}: played {' '.join(notes)}, heard {decode(answers[name, 0][0])}")
    same = all(
        torch.equal(stock.generate(input_features=sounds[name], **OPTIONS), answer)
        for (name, _), answer in answers.items()
    )
    print(f"same tokens as stock generate(): {same}")


if __name__ == "__main__":
    main()
