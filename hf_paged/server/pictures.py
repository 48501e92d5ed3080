"""Pictures of a chat: data URLs, through the model's processor."""

from __future__ import annotations

import base64
import binascii
import io
import re
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from hf_paged.server.errors import ApiError, bad_field, queue_full
from hf_paged.server.settings import ServerSettings

DATA_URL = re.compile(r"data:image/[a-z.+-]+;base64,", re.IGNORECASE)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
LEAST_SIDE = 512  # to which processors may scale up the shorter side of a picture, and the other one with it
OF_TEXT = ("input_ids", "attention_mask")


def limits_of(settings: ServerSettings) -> str:
    """The limits of pictures, as clients are told."""
    return (
        f"Pictures are data URLs of {', '.join(FORMATS)}, not animated: at most {settings.max_pictures} in a request, "
        f"with {settings.max_pixels:,} pixels together; one whose shorter side is below {LEAST_SIDE} counts as scaled "
        f"up to that. While all requests before their first token have {settings.max_pixels_at_work:,} pixels, the "
        "answer is 429."
    )


@dataclass(slots=True, eq=False, weakref_slot=True)
class Pixels:
    """Pixels that count as being at work until this is dropped, or `count` is 0."""

    count: int


@dataclass(slots=True)
class Opened:
    """A picture of Pillow's whose head was read, and where it is in the request."""

    picture: Any
    field: str

    @property
    def num_pixels(self) -> int:
        """That it may have when it is prepared."""
        width, height = self.picture.size
        return round(width * height * max(1.0, LEAST_SIDE / max(min(width, height), 1)) ** 2)

    def decode(self) -> Any:
        """The picture in RGB, the right way up.

        Raises:
            ApiError: It can't be decoded.
        """
        from PIL import ImageOps

        try:
            self.picture.info.pop("transparency", None)  # which has no place in RGB
            decoded = self.picture.convert("RGB")
            ImageOps.exif_transpose(decoded, in_place=True)
        except Exception as error:
            raise _unreadable(self.field) from error
        return decoded


class Pictures:
    """Reads pictures, and makes of a chat with them what `submit` takes."""

    def __init__(self, processor: Any, model: Any, settings: ServerSettings) -> None:
        """Serves one model.

        Args:
            processor: Of a model that sees: its tokenizer and what prepares pictures.
        """
        self._processor = processor
        self._model = model
        self._settings = settings
        self._at_work: weakref.WeakSet[Pixels] = weakref.WeakSet()
        self._lock = threading.Lock()

    def check_number(self, fields: list[str]) -> None:
        """Raises `ApiError` (400) for more pictures than a request may have, by where they are in it."""
        most = self._settings.max_pictures
        if len(fields) > most:
            raise bad_field(fields[most], f"{len(fields)} pictures are more than the limit of {most} for a request")

    def open(self, url: str, field: str) -> Opened:
        """A picture that isn't decoded yet.

        Raises:
            ApiError: It is none, or several; it is elsewhere, and would have to be fetched.
        """
        from PIL import Image  # what a processor of pictures needs itself

        head = DATA_URL.match(url)
        if head is None:
            raise bad_field(field, "a picture is a data URL, data:image/png;base64,...; others are not fetched")
        try:
            data = base64.b64decode(url[head.end() :], validate=True)
        except binascii.Error as error:
            raise bad_field(field, f"it is not base64: {error}") from None
        try:
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
            is_animated = getattr(picture, "is_animated", False) and picture.format != "MPO"  # whose first is the photo
        except Image.DecompressionBombError as error:
            raise bad_field(field, f"it has far more than the limit of {self._settings.max_pixels} pixels") from error
        except Exception as error:  # whatever a decoder says of bytes that it can't read
            raise _unreadable(field) from error
        if is_animated:
            raise bad_field(field, "it is animated: send its frames as pictures of their own")
        return Opened(picture, field)

    def _enter(self, opened: list[Opened]) -> Pixels:
        """Counts the pixels of a request's pictures as being at work.

        Raises:
            ApiError: They are more than a request may have (400), or than may be at work together with others (429).
        """
        total, most = 0, self._settings.max_pixels
        for each in opened:
            total += each.num_pixels
            if total > most:
                width, height = each.picture.size
                raise bad_field(
                    each.field,
                    f"{width} x {height} pixels make {total} for the pictures up to this one (with the shorter sides "
                    f"scaled up to {LEAST_SIDE} where they are below), and the limit for a request is {most}",
                )
        with self._lock:
            busy = sum(each.count for each in self._at_work)
            if total and busy + total > self._settings.max_pixels_at_work:
                raise queue_full(f"pictures with {busy} pixels are at work: ask again later")
            pixels = Pixels(total)
            self._at_work.add(pixels)
        return pixels

    def chat(self, messages: list[dict[str, Any]], **arguments: Any) -> tuple[list[int], dict[str, Any], Pixels]:
        """A chat with pictures in it: its token ids, the other inputs of the prompt, and what counts as being at work.

        Args:
            messages: Each a list of parts, with opened pictures.
        """
        parts = [part for message in messages for part in message.get("content") or () if part["type"] == "image"]
        pixels = self._enter([part["image"] for part in parts])
        try:
            for part in parts:
                part["image"] = part["image"].decode()
            found = self._processor.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_tensors="pt", **arguments
            ).to(self._model.device, self._model.dtype)
        except BaseException:
            pixels.count = 0
            raise
        inputs = {name: value for name, value in found.items() if name not in OF_TEXT}
        return found["input_ids"][0].tolist(), inputs, pixels


def _unreadable(field: str) -> ApiError:
    return bad_field(field, f"it is no picture that can be read, of {', '.join(FORMATS)}")
