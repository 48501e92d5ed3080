"""Pictures of a chat: data URLs, through the model's processor."""

from __future__ import annotations

import base64
import binascii
import io
import re
from typing import Any

from hf_paged.server.errors import bad_field

DATA_URL = re.compile(r"data:image/[a-z.+-]+;base64,", re.IGNORECASE)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 1 << 25  # a small file may be a very large picture
OF_TEXT = ("input_ids", "attention_mask")


class Pictures:
    """Reads pictures, and makes of a chat with them what `submit` takes."""

    def __init__(self, processor: Any, model: Any) -> None:
        """Serves one model.

        Args:
            processor: Of a model that sees: its tokenizer and what prepares pictures.
            model: The model.
        """
        self._processor = processor
        self._model = model

    def read(self, url: str, field: str) -> Any:
        """A picture, as Pillow's.

        Raises:
            ApiError: It is none; it is elsewhere, and would have to be fetched; it is too large.
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
            width, height = picture.size
            if width * height <= MAX_PIXELS:
                return picture.convert("RGB")
        except Exception as error:  # whatever a decoder says of bytes that it can't read
            raise bad_field(field, f"it is no picture that can be read, of {', '.join(FORMATS)}") from error
        raise bad_field(field, f"{width} x {height} pixels are more than the limit of {MAX_PIXELS}")

    def chat(self, messages: list[dict[str, Any]], **arguments: Any) -> tuple[list[int], dict[str, Any]]:
        """A chat with pictures in it: its token ids, and the other inputs of the prompt.

        Args:
            messages: Each a list of parts.
            **arguments: Of `apply_chat_template`.
        """
        found = self._processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", **arguments
        ).to(self._model.device, self._model.dtype)
        return found["input_ids"][0].tolist(), {name: value for name, value in found.items() if name not in OF_TEXT}
