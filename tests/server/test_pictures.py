"""Chats with pictures, beside stock `generate()` with the same ones."""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image

from helpers.models import tiny_tokenizer
from helpers.serving import Served, serving
from helpers.waiting import eventually
from helpers.wrappers import SIZE, WRAPPERS
from hf_paged.server.pictures import Opened
from hf_paged.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
NEW = 10
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{{ first_words or '' }}{% endif %}"
)


@cache
def processor() -> Any:
    """A processor for a tiny model that sees, over the embedded model's tokenizer."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    side = {"height": SIZE, "width": SIZE}
    return hf.LlavaProcessor(
        hf.CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=side),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


@cache
def stock() -> Any:
    config = WRAPPERS["llava"].config()
    config.text_config.vocab_size = len(processor().tokenizer)
    config.image_token_index = config.image_token_id = processor().image_token_id
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = hf.LlavaForConditionalGeneration(config).eval()
        for parameter in model.parameters():
            parameter.copy_(0.16 * torch.randn_like(parameter))
    model.generation_config.update(eos_token_id=2, pad_token_id=0)
    return model


def picture(seed: int) -> Image.Image:
    pixels = torch.randint(0, 256, (24, 18, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.numpy())


def url_of(image: Image.Image, kind: str = "PNG") -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def part_of(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(picture(seed))}}


def expected(text: str, pictures: list[int], **arguments: Any) -> list[str]:
    """What stock says, whose processor gets the same."""
    given = processor()(text=[text], images=[picture(seed) for seed in pictures] or None, return_tensors="pt")
    rows = stock().generate(**given, max_new_tokens=NEW, **{"do_sample": False} | arguments)
    return processor().batch_decode(rows[:, given["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(
        ServerSettings(model_name="tiny"), copy.deepcopy(stock()), processor().tokenizer, processor()
    ) as running:
        yield running
        running.settle()


def ask(served: Served, content: Any, **more: Any) -> list[str]:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": NEW} | more
    reply = served.post(CHAT, body)
    assert reply.status_code == 200, reply.text
    return [choice["message"]["content"] for choice in reply.json()["choices"]]


def test_tokens_are_those_of_stock(served: Served) -> None:
    """Would break: pictures of one request in another one's, their order, a text that is tokenised otherwise."""
    found = []
    for pictures in ([0], [1], [1, 0], []):
        content = [{"type": "text", "text": "What"}, *map(part_of, pictures), {"type": "text", "text": " is it?"}]
        text = f"user: What{'<image>' * len(pictures)} is it?\nassistant:"
        found.append(ask(served, content))
        assert found[-1] == expected(text, pictures)
    assert len({text for texts in found for text in texts}) == 4, "the pictures change nothing"
    assert ask(served, "What is it?") == found[-1]


def test_variables_of_the_template(served: Served) -> None:
    """Would break: a client that sets what the processor does with pictures."""
    content, prompt = [part_of(0)], "user: <image>\nassistant:"
    assert ask(served, content, chat_template_kwargs={"first_words": " A"}) == expected(f"{prompt} A", [0])
    assert ask(served, content, reasoning_effort="high") == expected(prompt, [0])
    for name in ("size", "images", "messages", "tokenize"):
        body = {"messages": [{"role": "user", "content": content}], "chat_template_kwargs": {name: {"height": 1 << 20}}}
        reply = served.post(CHAT, body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == f"chat_template_kwargs.{name}"
    beams = ask(served, [part_of(0)], num_beams=3, n=2)
    assert beams == expected("user: <image>\nassistant:", [0], num_beams=3, num_return_sequences=2)


def test_other_ways_to_ask(served: Served) -> None:
    whole = ask(served, [{"type": "text", "text": "A"}, part_of(0)])
    text = "user: A<image>\nassistant:"
    assert whole == expected(text, [0])
    part = {"type": "input_image", "image_url": url_of(picture(0)), "detail": "auto"}
    content = [{"type": "input_text", "text": "A"}, part]
    reply = served.client.responses.create(
        model="tiny", input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=NEW, store=False
    )  # type: ignore[call-overload]
    assert [reply.output_text] == whole
    ids = processor()(text=[text], images=[picture(0)])["input_ids"][0]
    assert reply.usage.input_tokens == len(ids)
    messages = [{"role": "user", "content": [{"type": "text", "text": "A"}, part_of(0)]}]
    assert served.post("/tokenize", {"messages": messages}).json()["tokens"] == ids
    jpeg = url_of(Image.new("L", (40, 20), 90), "JPEG")
    assert len(ask(served, [{"type": "image_url", "image_url": {"url": jpeg, "detail": "auto"}}])) == 1


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("https://example.org/a.png", "not fetched"),
        ("file:///etc/passwd", "not fetched"),
        ("/etc/passwd", "not fetched"),
        ("data:image/png;base64,%%%", "base64"),
        ("data:image/png;base64,AAAA", "no picture"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "no picture"),
        (url_of(picture(0))[:300], "base64|no picture"),
        (url_of(Image.new("1", (6000, 6000))), "pixels"),
    ],
)
def test_refused(served: Served, url: str, what: str) -> None:
    """Would break: a server that fetches what it is told to, a picture that fills the memory, a 500."""
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    error = served.post(CHAT, body).json()["error"]
    assert error["param"] == "messages.0.content.0.image_url"
    assert any(word in error["message"] for word in what.split("|")), error


def test_marks_without_pictures(served: Served) -> None:
    """Would break: a 500 for a text that holds the mark of a picture."""
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "<image><image>"}, part_of(0)]}]}
    reply = served.post(CHAT, body | {"max_tokens": 2})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages", reply.text


def frames_of(kind: str) -> str:
    """An animated picture."""
    buffer = io.BytesIO()
    picture(0).save(buffer, kind, save_all=True, append_images=[picture(1)])
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def parts_of(*urls: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


SMALL = url_of(Image.new("1", (512, 512)))
CUT = url_of(Image.effect_noise((500, 500), 50), "JPEG")[: 23 + 48_000]  # its head is whole


@pytest.fixture(scope="module")
def limited() -> Iterator[Served]:
    """Takes three small pictures at once."""
    settings = ServerSettings(model_name="tiny", max_pictures=4, max_pixels=800_000, max_pixels_at_work=800_000)
    with serving(settings, copy.deepcopy(stock()), processor().tokenizer, processor()) as running:
        yield running
        running.settle()


@pytest.mark.parametrize(
    ("urls", "place", "what"),
    [
        ([SMALL] * 4, 3, "512 x 512 pixels make 1048576 "),
        ([url_of(Image.new("1", (1, 1)))] * 4, 3, "make 1048576 "),
        ([SMALL, url_of(Image.new("1", (3, 40_000)))], 1, "3 x 40000"),
        ([SMALL] * 5, 4, "5 pictures"),
        ([SMALL, url_of(Image.new("1", (20_000, 20_000)))], 1, "more than"),
        ([SMALL, frames_of("GIF")], 1, "animated"),
        ([frames_of("WEBP")], 0, "animated"),
        ([frames_of("PNG")], 0, "animated"),
        ([SMALL, CUT], 1, "no picture that can be read"),
    ],
)  # fmt: skip
def test_limits(limited: Served, monkeypatch: pytest.MonkeyPatch, urls: list[str], place: int, what: str) -> None:
    """Would break: gigabytes for a few kilobytes; pixels of refused pictures that count for ever."""
    decoded: list[Opened] = []
    decode = Opened.decode

    def note(opened: Opened) -> Any:
        decoded.append(opened)
        return decode(opened)

    monkeypatch.setattr(Opened, "decode", note)
    for _ in range(3):
        reply = limited.post(CHAT, {"messages": [{"role": "user", "content": parts_of(*urls)}]})
        error = reply.json()["error"]
        assert reply.status_code == 400 and what in error["message"], error
        assert error["param"] == f"messages.0.content.{place}.image_url"
    assert CUT in urls or not decoded, "one was decoded before all heads were read"
    assert len(ask(limited, parts_of(SMALL, SMALL, SMALL))) == 1


def test_pixels_at_work(limited: Served) -> None:
    """Would break: a share of them for each request that is sent; a share that is kept by one that has ended."""
    table = limited.server.config.app.state.requests  # type: ignore[union-attr]
    body = {"messages": [{"role": "user", "content": parts_of(SMALL, SMALL)}], "max_tokens": 5, "stream": True}
    for is_left in (False, True):
        limited.engine.pause()
        with limited.http.stream("POST", CHAT, json=body) as reply:
            lines = reply.iter_lines()
            next(lines)  # of its role: it is queued
            assert reply.status_code == 200 and table.rows()[0].state == "waiting"
            for path, other in ((CHAT, body), ("/tokenize", {"messages": body["messages"]})):
                full = limited.post(path, other)
                assert full.status_code == 429 and full.headers["Retry-After"] == "1", full.text
                assert full.json()["error"]["code"] == "queue_full"
            if not is_left:
                limited.engine.resume()
                list(lines)
        limited.engine.resume()
        eventually(limited.is_free, "it is held")
        assert limited.post("/tokenize", {"messages": body["messages"]}).status_code == 200
        assert len(ask(limited, parts_of(SMALL, SMALL, SMALL))) == 1


@pytest.mark.parametrize("fields", [{"max_tokens": 10**6}, {"n": 128, "top_logprobs": 20, "max_tokens": 250}], ids=str)
def test_pixels_of_what_is_refused_later(limited: Served, fields: dict[str, Any]) -> None:
    """Would break: pixels that count for ever, of a request that the engine has never seen."""
    body = {"messages": [{"role": "user", "content": parts_of(SMALL, SMALL)}], "logprobs": True} | fields
    for _ in range(3):
        reply = limited.post(CHAT, body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "max_tokens", reply.text


def test_limits_are_told(limited: Served) -> None:
    paths = limited.http.get("/openapi.json").json()["paths"]
    for path in (CHAT, "/v1/responses"):
        assert "at most 4 in a request, with 800,000 pixels" in paths[path]["post"]["description"]
    part = {"type": "input_image", "image_url": frames_of("GIF")}
    body = {"input": [{"role": "user", "content": [part]}], "instructions": "Be brief."}
    assert limited.post("/v1/responses", body).json()["error"]["param"] == "input.0.content.0.image_url"


def test_pictures_of_other_kinds(served: Served) -> None:
    """Would break: a picture on its side, warnings for transparency, photos of which a phone stores a second one."""
    turned, plain = io.BytesIO(), picture(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    plain.save(turned, "PNG", exif=exif)
    url = f"data:image/png;base64,{base64.b64encode(turned.getvalue()).decode()}"
    upright = ask(served, parts_of(url_of(plain.transpose(Image.Transpose.ROTATE_270))))
    assert ask(served, parts_of(url)) == upright != ask(served, parts_of(url_of(plain)))
    palette = plain.quantize(16)
    expected = ask(served, parts_of(url_of(palette)))
    palette.info["transparency"] = bytes(range(16))
    assert ask(served, parts_of(url_of(palette))) == expected
    photo = io.BytesIO()
    plain.save(photo, "MPO", save_all=True, append_images=[picture(1)])
    url = f"data:image/jpeg;base64,{base64.b64encode(photo.getvalue()).decode()}"
    assert ask(served, parts_of(url)) == ask(served, parts_of(url_of(plain, "JPEG")))
