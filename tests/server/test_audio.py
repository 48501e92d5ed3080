"""Sounds over HTTP: formats, fields, limits and errors of `/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import io
import math
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args, get_type_hints
from unittest import mock

import numpy as np
import pytest
import soundfile
import torch
from openai import BadRequestError
from openai.types import audio
from transformers import MoonshineConfig, MoonshineForConditionalGeneration, Wav2Vec2FeatureExtractor, WhisperProcessor

import hf_paged
from helpers import speech
from helpers.models import tiny_tokenizer
from helpers.serving import Served, serving
from helpers.waiting import eventually
from hf_paged.server import ServerSettings, create_app, transcriptions
from hf_paged.server.fields import HONOURED, REFUSED, TRANSCRIPTION, TRANSLATION
from hf_paged.server.sounds import decoded, resampled
from hf_paged.server.transcriptions import TranscriptionRequest, TranslationRequest

MAX_SECONDS, FEW = 6, (0.0, 0.8)


def file_of(samples: Any, kind: str = "wav", rate: int = speech.RATE, **more: Any) -> tuple[str, bytes]:
    written = io.BytesIO()
    soundfile.write(written, samples, rate, format=kind.upper(), **more)
    return f"sound.{kind}", written.getvalue()


@pytest.fixture(scope="module")
def hearing() -> Iterator[Served]:
    processor = WhisperProcessor(speech.feature_extractor(), speech.tokenizer())
    settings = ServerSettings(model_name="tiny", max_audio_seconds=MAX_SECONDS, max_audio_bytes=1 << 20)
    # Random weights are never sure: all temperatures are tried for each segment.
    with (
        mock.patch.object(transcriptions, "TEMPERATURES", FEW),
        serving(settings, speech.tiny_whisper(), speech.tokenizer(), processor) as running,
    ):
        yield running
        running.settle()


def ask(served: Served, path: str = "transcriptions", sound: Any = None, **form: Any) -> Any:
    name, content = file_of(speech.sound(0.7)) if sound is None else sound
    return served.http.post(f"/v1/audio/{path}", files={"file": (name, content)}, data=form)


def refused(reply: Any, param: str | None = None, status: int = 400) -> str:
    error = reply.json()["error"]
    assert reply.status_code == status and error["param"] == param, reply.text
    return error["message"]


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000, 44_101])
def test_resampling_keeps_what_both_rates_have(rate: int) -> None:
    """Beside the same sines at the other rate, as they are by formula; frequencies that it can't hold are gone."""
    tones = [100.0, 440.0, 1234.5, 0.42 * min(rate, speech.RATE)]

    def sines(own: int, frequencies: list[float]) -> np.ndarray:
        time = np.arange(own) / own
        return sum(np.sin(2 * np.pi * f * time + f) for f in frequencies)  # type: ignore[return-value]

    def at_other_rate(samples: np.ndarray, *cuts: int) -> np.ndarray:
        return np.concatenate(list(resampled(np.split(samples.astype(np.float32), cuts), rate, speech.RATE)))

    found = at_other_rate(sines(rate, tones))
    assert len(found) == speech.RATE and found.dtype == np.float32
    assert np.array_equal(found, at_other_rate(sines(rate, tones), 0, 1, 5, 700, 701, 7000)), "whatever the blocks"
    assert np.abs(found - sines(speech.RATE, tones))[300:-300].max() < 1e-3
    if rate > speech.RATE:
        assert np.abs(at_other_rate(sines(rate, [0.56 * speech.RATE])))[300:-300].max() < 1e-3
    same = np.ones(7, np.float32)
    assert next(resampled([same], rate, rate)) is same
    for length in (1, 2, 29):
        assert len(at_other_rate(np.ones(length))) == math.ceil(length * speech.RATE / rate)


def test_a_small_file_may_hold_gigabytes() -> None:
    """Would break: decoding all of a file before its samples are brought to the model's rate."""
    written = io.BytesIO()
    with soundfile.SoundFile(written, "w", samplerate=192_000, channels=1, format="FLAC") as sound:
        for _ in range(40):
            sound.write(np.zeros(192_000, np.float32))
    assert written.tell() < 1 << 17
    written.seek(0)
    tracemalloc.start()
    try:
        assert len(decoded(written, speech.RATE, 60.0)) == 40 * speech.RATE
        assert tracemalloc.get_traced_memory()[1] < 40 * 192_000 * 4, "its samples alone"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("seconds", [0.7, 1.6], ids=["short", "long"])
def test_text_is_that_of_generate(hearing: Served, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, given = speech.sound(seconds), []
    submit = hearing.engine.submit
    monkeypatch.setattr(hearing.engine, "submit", lambda **named: given.append(named) or submit(**named))
    sound = file_of(samples, subtype="FLOAT")
    said = ask(hearing, sound=sound, response_format="verbose_json", language="en").json()
    long = {"truncation": False, "padding": "longest"} if seconds > 1 else {}
    features = speech.feature_extractor()(samples, sampling_rate=speech.RATE, return_tensors="pt", **long)
    model = speech.tiny_whisper()
    torch.manual_seed(given[0]["seed"])
    expected = model.generate(
        features.input_features, return_timestamps=True, return_segments=True, language="en", task="transcribe",
        temperature=FEW, **transcriptions.THRESHOLDS,
    )  # fmt: skip
    segments = expected["segments"][0]
    assert [segment["tokens"] for segment in said["segments"]] == [each["tokens"].tolist() for each in segments]
    assert [segment["start"] for segment in said["segments"]] == [
        round(min(float(each["start"]), seconds), 2) for each in segments
    ]
    assert said["text"] == speech.tokenizer().decode(expected["sequences"][0], skip_special_tokens=True).strip()
    assert said["language"] == "english" and said["duration"] == seconds
    assert all(segment["end"] <= seconds and segment["avg_logprob"] < 0 for segment in said["segments"])


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3", "ogg"])
def test_kinds_of_files(hearing: Served, kind: str) -> None:
    stereo = np.stack([speech.sound(0.8, rate=44_100)] * 2, axis=1)
    said = ask(hearing, sound=file_of(stereo, kind, 44_100), response_format="verbose_json", temperature="0")
    assert said.status_code == 200 and math.isclose(said.json()["duration"], 0.8, abs_tol=0.1)


def test_openais_client(hearing: Served) -> None:
    client, sound = hearing.client.audio, file_of(speech.sound(0.9))
    said = client.transcriptions.create(model="tiny", file=sound, language="fr", prompt="abc", temperature=0.5)
    assert isinstance(said, audio.Transcription) and said.text
    verbose = client.transcriptions.create(
        model="tiny", file=sound, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert verbose.segments and verbose.language in ("english", "french", "german")
    assert verbose.text == "".join(segment.text for segment in verbose.segments).strip()
    english = client.translations.create(model="tiny", file=sound, response_format="verbose_json")
    assert english.language == "english" and english.segments
    with pytest.raises(BadRequestError, match="stream"):
        client.transcriptions.create(model="tiny", file=sound, stream=True)


def test_formats(hearing: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged.server.transcriptions.secrets.randbits", lambda _: 5)
    sound = file_of(speech.sound(1.2))
    text = ask(hearing, sound=sound, response_format="text", language="en")
    assert text.headers["content-type"].startswith("text/plain")
    assert text.text.strip() == ask(hearing, sound=sound, response_format="json", language="en").json()["text"]
    srt = ask(hearing, sound=sound, response_format="srt", language="en").text
    vtt = ask(hearing, sound=sound, response_format="vtt", language="en").text
    times = [line for line in srt.splitlines() if "-->" in line]
    assert times and srt.startswith("1\n00:00:0") and all("," in line for line in times)
    assert (
        vtt.startswith("WEBVTT\n\n00:00:0") and vtt.count("-->") == len(times) and "," not in times[0].replace(",", ".")
    )


def test_what_a_request_asks_for_changes_it(hearing: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    submit = hearing.engine.submit
    monkeypatch.setattr(hearing.engine, "submit", lambda **named: given.append(named) or submit(**named))
    for form in ({"language": "german"}, {"prompt": "ab"}, {"temperature": "0.5"}, {}):
        assert ask(hearing, **form).status_code == 200
    ask(hearing, "translations")
    german, prompted, hot, plain, translated = given
    assert german["language"] == "de" and "language" not in plain and plain["task"] == "transcribe"
    assert prompted["prompt_ids"].tolist()[0] == speech.PREVIOUS and "prompt_ids" not in plain
    assert hot["temperature"] == 0.5 and plain["temperature"] == FEW
    assert translated["task"] == "translate" and hot["seed"] != plain["seed"]


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"model": "other"}, "model"),
        ({"language": "tlh"}, "language"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "1.5"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"temperature": "1e-45"}, "temperature"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities.0"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities"),
        ({"prompt": "<|startoftranscript|>"}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"voice": "low"}, "voice"),
    ],
)
def test_what_a_form_may_not_say(hearing: Served, form: dict[str, Any], param: str) -> None:
    refused(ask(hearing, **form), param, 404 if param == "model" else 400)


REFUSED_FIELDS = [name for name, rule in TRANSCRIPTION.items() if rule.fate == REFUSED]


@pytest.mark.parametrize("name", REFUSED_FIELDS)
def test_fields_that_are_not_supported(hearing: Served, name: str) -> None:
    assert "not supported" in refused(ask(hearing, **{name: "something"}), name)
    assert "not supported" in refused(ask(hearing, **{f"{name}[]": ["a", "b"]}), name)
    if name == "stream":
        assert ask(hearing, stream="false").status_code == 200


@pytest.mark.parametrize(
    ("kind", "theirs", "table"),
    [
        (TranscriptionRequest, get_args(audio.TranscriptionCreateParams), TRANSCRIPTION),
        (TranslationRequest, (audio.TranslationCreateParams,), TRANSLATION),
    ],
)
def test_every_field_of_openai_has_a_rule(kind: Any, theirs: tuple[Any, ...], table: Any) -> None:
    assert {name for each in theirs for name in get_type_hints(each)} <= set(table)
    assert {name for name, rule in table.items() if rule.fate == HONOURED} == set(kind.names())


def test_broken_files_and_forms(hearing: Served) -> None:
    sound = file_of(speech.sound(0.5))
    refused(ask(hearing, sound=("a.wav", b"RIFF nonsense")), "file")
    refused(ask(hearing, sound=("a.wav", b"")), "file")
    refused(ask(hearing, sound=file_of(np.zeros(0))), "file")
    refused(ask(hearing, sound=file_of(speech.sound(0.2), "aiff")), "file")
    assert "limit of 6 seconds" in refused(
        ask(hearing, sound=file_of(speech.sound(MAX_SECONDS + 0.1, rate=8000), "flac", 8000)), "file"
    )
    refused(ask(hearing, sound=file_of(np.zeros(600), rate=500)), "file")
    path = "/v1/audio/transcriptions"
    refused(hearing.http.post(path, json={"file": "a"}))
    refused(hearing.http.post(path, files={"sound": sound}), "sound")
    refused(hearing.http.post(path, files={"model": (None, "tiny")}), "file")
    refused(hearing.http.post(path, files=[("file", sound), ("file", sound)]))
    refused(hearing.http.post(path, content=b"--x\r\n", headers={"Content-Type": "multipart/form-data"}))
    refused(hearing.http.post(path, data={"file": "a.wav"}, files={"a": (None, "b")}), "file")
    refused(ask(hearing, sound=("a.wav", bytes(2 << 20))), status=413)
    odd = {"Content-Type": "Multipart/Form-Data; boundary=x"}
    assert "file: " in refused(hearing.http.post(path, content=b"--x--\r\n", headers=odd), "file")


@pytest.mark.parametrize("value", [1e38, -1e38, math.inf, math.nan])
def test_samples_beyond_all_measure(hearing: Served, value: float) -> None:
    """Would break: features that are NaN, and then an error of the server's."""
    assert ask(hearing, sound=file_of(np.full(9000, value, np.float32), subtype="FLOAT")).status_code == 200


def test_text_is_refused(hearing: Served) -> None:
    for path, body in (
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        assert "audio/transcriptions" in refused(hearing.post(f"/v1/{path}", body), "model")
    page = hearing.http.get("/openapi.json").json()
    content = page["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]
    assert list(content) == ["multipart/form-data"] and hearing.http.get("/docs").status_code == 200


def test_too_many_sounds_at_once(hearing: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: as many scores in memory as clients like, of sounds that are each within the limit."""
    behind = hearing.server.config.app.state.serving
    monkeypatch.setattr(behind, "settings", replace(behind.settings, max_audio_seconds_at_work=MAX_SECONDS))
    sound = file_of(speech.sound(3.1, 3))
    hearing.engine.pause()
    thread = threading.Thread(target=ask, args=(hearing,), kwargs={"sound": sound})
    thread.start()
    eventually(lambda: len(behind.sounds) > 0 and any(not each.is_done for each in behind.sounds), "it is not queued")
    assert "seconds of sound" in refused(ask(hearing, sound=sound), status=429)
    hearing.engine.resume()
    thread.join()
    assert ask(hearing, sound=sound).status_code == 200


def test_a_client_that_goes_away_ends_its_transcription(hearing: Served) -> None:
    before = hearing.engine.stats().num_steps

    def go() -> None:
        with pytest.raises(Exception, match="timed out"):
            hearing.http.post("/v1/audio/transcriptions", files={"file": file_of(speech.sound(5.9, 3))}, timeout=0.7)

    thread = threading.Thread(target=go)
    thread.start()
    eventually(lambda: hearing.engine.stats().num_steps > before, "it never began")
    thread.join()
    hearing.settle()


def test_a_model_without_times_gives_text(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder")
             for name, value in {"num_hidden_layers": 1, "num_attention_heads": 2}.items()}  # fmt: skip
    model = MoonshineForConditionalGeneration(
        MoonshineConfig(vocab_size=300, hidden_size=32, intermediate_size=48, max_position_embeddings=40,
                        bos_token_id=1, eos_token_id=2, pad_token_id=2, decoder_start_token_id=1, **sizes)
    ).eval()  # fmt: skip
    expected = model.generate(torch.from_numpy(speech.sound(0.7))[None], max_new_tokens=39)
    with serving(
        ServerSettings(model_name="tiny"), model, tiny_tokenizer(), Wav2Vec2FeatureExtractor(do_normalize=False)
    ) as served:
        sound = file_of(speech.sound(0.7), subtype="FLOAT")
        text = tiny_tokenizer().decode(expected[0, 1:], skip_special_tokens=True).strip()
        assert ask(served, sound=sound).json()["text"] == text
        assert ask(served, sound=sound, response_format="text", temperature="0.7").status_code == 200
        for form in ({"language": "en"}, {"prompt": "a"}, {"response_format": "srt"}):
            refused(ask(served, sound=sound, **form), next(iter(form)))
        refused(ask(served, "translations", sound=sound), "model")


def test_a_model_that_hears_needs_its_processor_and_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_paged.patch(speech.tiny_whisper(), num_blocks=32)
    with pytest.raises(ValueError, match="processor"):
        create_app(model, speech.tokenizer())
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ModuleNotFoundError, match=r"hf-paged\[audio\]"):
        create_app(model, speech.tokenizer(), processor=speech.feature_extractor())
