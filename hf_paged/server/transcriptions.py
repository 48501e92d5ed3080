"""`/v1/audio/transcriptions` and `/v1/audio/translations`: the words of a sound, in its language or in English."""

from __future__ import annotations

import math
import secrets
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from fastapi import Request
from pydantic import AfterValidator, Field, PrivateAttr, model_validator
from starlette.responses import PlainTextResponse
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from hf_paged import QueueFullError, RequestOutput
from hf_paged.server import fields
from hf_paged.server.errors import ApiError, bad_argument, bad_field, logger, queue_full, server_ends
from hf_paged.server.limits import read_form
from hf_paged.server.replies import unless_gone
from hf_paged.server.schemas import Body, usable
from hf_paged.server.serving import Serving
from hf_paged.server.sounds import decoded

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
# As Whisper's authors have it: a segment is decoded again, hotter each time, if it repeats itself or is unlikely.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
THRESHOLDS = {"compression_ratio_threshold": 1.35, "logprob_threshold": -1.0, "no_speech_threshold": 0.6}
TIMED = ("verbose_json", "srt", "vtt")


class TranslationRequest(Body):
    """The form of `/v1/audio/translations`."""

    rules = fields.TRANSLATION
    file: str = Field(json_schema_extra={"format": "binary"})
    model: str | None = None
    prompt: str | None = Field(None, max_length=4096)
    response_format: str = "json"
    temperature: Annotated[float, Field(ge=0, le=1, strict=False), AfterValidator(usable)] = 0.0  # a text
    _upload: Any = PrivateAttr(None)

    def take(self, upload: Any) -> None:
        """Takes the file that was sent."""
        self._upload = upload


class TranscriptionRequest(TranslationRequest):
    """The form of `/v1/audio/transcriptions`."""

    rules = fields.TRANSCRIPTION
    language: str | None = Field(None, min_length=1, max_length=32)
    timestamp_granularities: list[Literal["segment"]] = Field(default_factory=list, max_length=1)

    @model_validator(mode="after")
    def _check_times(self) -> TranscriptionRequest:
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise ValueError("timestamp_granularities: only with response_format=verbose_json")
        return self


async def transcribe(serving: Serving, request: Request) -> Any:
    """Writes down the words of a sound."""
    return await _answer(serving, request, TranscriptionRequest, "transcribe")


async def translate(serving: Serving, request: Request) -> Any:
    """Writes down the words of a sound in English."""
    return await _answer(serving, request, TranslationRequest, "translate")


async def _answer(serving: Serving, request: Request, kind: type[TranslationRequest], task: str) -> Any:
    body = await serving.body(request, kind, read_form)
    async with serving.in_time():
        async with serving.starting():
            # One sound after another is decoded and encoded, beside all steps: torch takes every core for either.
            work = serving.in_thread(_submit, serving, body, task, size=1 << 62)
            handle, seconds = await unless_gone(request.receive, work)
        try:
            output = await unless_gone(request.receive, _result(handle))
        finally:
            handle.cancel()
    return _shown(body, await serving.in_thread(Transcript.of, serving, task, output, seconds))


async def _result(handle: Any) -> RequestOutput:
    try:
        output: RequestOutput = await handle
    except Exception as error:
        logger.exception("a transcription failed in the engine")
        raise ApiError(500, f"the engine failed: {type(error).__name__}", code="engine_error") from error
    if output.finish_reason == "cancelled":
        raise server_ends()
    return output


def _submit(serving: Serving, body: TranslationRequest, task: str) -> tuple[Any, float]:
    """Queues a request; returns its handle, and the seconds of its sound. Takes as long as the encoder."""
    ears = serving.ears
    assert ears is not None
    with body._upload.file as file:
        arguments = _arguments(serving, body, task)  # a sound beside bad ones need not be decoded
        samples = decoded(file, ears.rate, serving.settings.max_audio_seconds)
    seconds, settings = len(samples) / ears.rate, serving.settings
    most = settings.max_audio_seconds_at_work or 4 * settings.max_audio_seconds
    if seconds + sum(own for each, own in list(serving.sounds.items()) if not each.is_done) > most:
        raise queue_full(f"{most:g} seconds of sound may be at work, and so many are: ask again later")
    try:
        handle = serving.engine.submit(**ears.heard(samples), **arguments, seed=secrets.randbits(62))
    except QueueFullError as error:
        raise queue_full(str(error)) from None
    except ValueError as error:
        raise bad_argument(str(error), type(body).model_fields) from error
    serving.sounds[handle] = seconds
    return handle, seconds


def _arguments(serving: Serving, body: TranslationRequest, task: str) -> dict[str, Any]:
    config, language = serving.model.generation_config, getattr(body, "language", None)
    if serving.ears is None or not serving.ears.has_times:
        for name, given in (("language", language), ("prompt", body.prompt)):
            if given is not None:
                raise bad_field(name, f"{serving.model_name} takes none: Whisper's models do")
        if body.response_format in TIMED:
            raise bad_field("response_format", f"{serving.model_name} does not say when: json or text")
        if task == "translate":
            raise ApiError(400, f"{serving.model_name} does not translate: Whisper's models do", "model")
        drawn = {"do_sample": True, "temperature": body.temperature} if body.temperature else {"do_sample": False}
        limit = {} if config.max_length or config.max_new_tokens else {"max_new_tokens": serving.max_model_len - 1}
        return drawn | limit
    arguments: dict[str, Any] = {"return_timestamps": True, "return_segments": True, **THRESHOLDS}
    arguments["temperature"] = body.temperature or TEMPERATURES
    if getattr(config, "is_multilingual", False):
        arguments |= {"task": task} | ({} if language is None else {"language": _known(serving, language)})
    elif task == "translate" or language not in (None, "en", "english"):
        what = "task" if task == "translate" else "language"
        raise bad_field("model" if what == "task" else what, f"{serving.model_name} knows English alone")
    if body.prompt:
        try:
            arguments["prompt_ids"] = serving.tokenizer.get_prompt_ids(body.prompt, return_tensors="pt")
        except ValueError as error:
            raise bad_field("prompt", str(error)) from None
    return arguments


def _known(serving: Serving, language: str) -> str:
    """A language's code, by its code or name."""
    codes = {name: code for code, name in LANGUAGES.items()}
    code = codes.get(language.lower(), language.lower())
    if f"<|{code}|>" not in serving.model.generation_config.lang_to_id:
        raise bad_field("language", f"{language!r} is none that the model knows: ISO-639-1 codes such as en")
    return code


@dataclass(slots=True)
class Segment:
    """The words between two times, in seconds, and the mean log-probability of their tokens."""

    start: float
    end: float
    text: str
    token_ids: list[int]
    mean_logprob: float


@dataclass(slots=True)
class Transcript:
    """The words of a sound of so many seconds; a model without times gives no segments."""

    text: str
    seconds: float
    language: str | None
    segments: list[Segment]

    @classmethod
    def of(cls, serving: Serving, task: str, output: RequestOutput, seconds: float) -> Transcript:
        def text_of(token_ids: list[int]) -> str:
            text: str = serving.tokenizer.decode(token_ids, skip_special_tokens=True)
            return text

        if output.returned is None:
            return cls(text_of(output.token_ids).strip(), seconds, None, [])
        segments, languages = [], serving.model.generation_config.__dict__.get("lang_to_id", {})
        spoken = "english" if task == "translate" or not languages else None
        for each in output.returned["segments"][0]:
            if "result" not in each:  # the prompt, as one
                continue
            result, tokens = each["result"], each["tokens"].tolist()
            said = result["sequences"].tolist()
            if spoken is None:
                code = next((name for name, token in languages.items() if token in said), "")
                spoken = LANGUAGES.get(code.strip("<|>"), code.strip("<|>"))
            likely = _mean_logprob(result, each["idxs"])
            start, end = (min(float(each[name]), seconds) for name in ("start", "end"))  # a segment has silence behind
            segments.append(Segment(start, end, text_of(tokens), tokens, likely))
        return cls("".join(segment.text for segment in segments).strip(), seconds, spoken, segments)


def _mean_logprob(result: dict[str, Any], places: tuple[int, int]) -> float:
    """The mean of the tokens in these places of the window that a segment was cut out of."""
    sequence, scores = result["sequences"], result["scores"]
    first = len(sequence) - len(scores)  # tokens of the prompt
    found = [
        torch.log_softmax(scores[place - first].float(), dim=-1)[sequence[place]].item()
        for place in range(max(places[0], first), places[1])
    ]
    finite = [value for value in found if math.isfinite(value)]
    return sum(finite) / max(len(finite), 1)


def _shown(body: TranslationRequest, said: Transcript) -> Any:
    kind = body.response_format
    if kind == "json":
        return {"text": said.text, "usage": {"type": "duration", "seconds": math.ceil(said.seconds)}}
    if kind == "verbose_json":
        return {
            "task": "transcribe" if isinstance(body, TranscriptionRequest) else "translate",
            "language": said.language,
            "duration": round(said.seconds, 3),
            "text": said.text,
            "segments": [_verbose(number, segment, body) for number, segment in enumerate(said.segments)],
            "usage": {"type": "duration", "seconds": math.ceil(said.seconds)},
        }
    lines = [said.text] if kind == "text" else list(_subtitles(said.segments, is_vtt=kind == "vtt"))
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/vtt" if kind == "vtt" else "text/plain")


def _verbose(number: int, segment: Segment, body: TranslationRequest) -> dict[str, Any]:
    written = segment.text.encode()
    return {
        "id": number,
        "seek": round(segment.start * 100),  # frames
        "start": round(segment.start, 2),
        "end": round(segment.end, 2),
        "text": segment.text,
        "tokens": segment.token_ids,
        "temperature": body.temperature or None,  # 0: whichever of several gave the segment
        "avg_logprob": segment.mean_logprob,
        "compression_ratio": len(written) / len(zlib.compress(written)),
        "no_speech_prob": None,
    }


def _subtitles(segments: list[Segment], is_vtt: bool) -> Iterator[str]:
    if is_vtt:
        yield from ("WEBVTT", "")
    for number, segment in enumerate(segments, 1):
        if not is_vtt:
            yield str(number)
        yield f"{_clock(segment.start, is_vtt)} --> {_clock(segment.end, is_vtt)}"
        yield from (segment.text.strip().replace("-->", "->"), "")


def _clock(seconds: float, is_vtt: bool) -> str:
    total = round(seconds * 1000)
    hours, minutes, left = total // 3_600_000, total // 60_000 % 60, total % 60_000
    return f"{hours:02}:{minutes:02}:{left // 1000:02}{'.' if is_vtt else ','}{left % 1000:03}"
