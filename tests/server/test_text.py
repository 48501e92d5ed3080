"""Text from tokens as they come."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from helpers.models import tiny_tokenizer
from hf_paged.sampling.logprobs import TokenLogprobs
from hf_paged.server.logprobs import LEAST, TokenNames
from hf_paged.server.replies import TextEvents, event, event_pieces, joined, json_pieces
from hf_paged.server.text import UNKNOWN, Detokenizer, StopStrings, decoder_of


@settings(max_examples=200, derandomize=True)
@given(text=st.text(min_size=1, max_size=40), prompt=st.text(max_size=10), cuts=st.sets(st.integers(1, 60)))
def test_pieces_are_the_text(text: str, prompt: str, cuts: set[int]) -> None:
    """Would break: characters cut in two, spaces lost between pieces."""
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    expected = tokenizer.decode(ids)
    detokenizer = Detokenizer(tokenizer, before)
    pieces, start = [], 0
    for end in [*sorted(cut for cut in cuts if cut < len(ids)), len(ids)]:
        pieces.append(detokenizer.feed(ids[start:end]))
        start = end
    assert UNKNOWN in text or not any(UNKNOWN in piece for piece in pieces)
    assert "".join([*pieces, detokenizer.flush()]) == expected


def bytewise() -> Any:
    """A tokenizer that knows three words, and bytes for the rest, as Llama 2's does."""
    vocab = {"<unk>": 0, "▁the": 1, "b": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@settings(max_examples=200, derandomize=True)
@given(words=st.lists(st.sampled_from([1, 2, "😀", "é", "日"]), max_size=40))
def test_characters_of_many_bytes(words: list[int | str]) -> None:
    """Would break: the last byte of a character decoded together with the next one's."""
    tokenizer = bytewise()
    ids = [token for word in words for token in ([word] if type(word) is int else [b + 3 for b in str(word).encode()])]
    detokenizer = Detokenizer(tokenizer, [1, 2])
    pieces = [detokenizer.feed([token]) for token in ids]
    assert " theb" + "".join([*pieces, detokenizer.flush()]) == " " + tokenizer.decode([1, 2, *ids])


@pytest.mark.parametrize("make", [bytewise, tiny_tokenizer])
def test_bytes_of_parts_of_characters(make: Any) -> None:
    tokenizer, text = make(), "é日"
    ids = [byte + 3 for byte in text.encode()]
    if make is tiny_tokenizer:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    names = TokenNames(tokenizer)
    said = list(names.chat([TokenLogprobs(token_id, -1.0) for token_id in ids])["content"])
    assert bytes(byte for each in said for byte in each["bytes"]).decode() == text
    assert UNKNOWN in "".join(each["token"] for each in said), "the tokens are whole characters"


@settings(max_examples=500, derandomize=True)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_string_never_leaks(pieces: list[str], stops: list[str]) -> None:
    """The oracle reads character by character, and looks at the end of all that it has read."""
    whole, expected = "".join(pieces), None
    for end in range(1, len(whole) + 1):
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found:
            expected = whole[: end - max(map(len, found))]
            break
    watch, shown = StopStrings(stops), ""
    for piece in pieces:
        new, is_stop = watch.feed(piece)
        shown += new
        assert (expected if expected is not None else whole).startswith(shown)
        if is_stop:
            assert shown == expected
            return
    assert expected is None and shown + watch.flush() == whole


@settings(max_examples=200, derandomize=True)
@given(data=st.data(), skips=st.booleans())
def test_ids_are_decoded_as_transformers_does(data: st.DataObject, skips: bool) -> None:
    """Would break: special tokens shown or hidden, spaces tidied up."""
    tokenizer = tiny_tokenizer()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=20))
    expected = tokenizer.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
    assert decoder_of(tokenizer, skips)(ids) == expected


@pytest.mark.parametrize("name", ["decode", "_decode"])
def test_a_tokenizer_of_its_own_kind_decodes_itself(name: str) -> None:
    """Would break: a tokenizer that does more than its backend."""
    tokenizer = copy.copy(tiny_tokenizer())

    def own(self: Any, token_ids: Sequence[int], **options: Any) -> str:
        return f"own {list(token_ids)}"

    tokenizer.__class__ = type("Own", (type(tokenizer),), {name: own})
    assert decoder_of(tokenizer, True)([5, 6]) == "own [5, 6]"


@settings(max_examples=200, derandomize=True)
@given(texts=st.lists(st.tuples(st.integers(0, 3), st.text())))
def test_events_that_differ_in_their_text(texts: list[tuple[int, str]]) -> None:
    """Would break: a character of the text that is JSON's, a text under another's index."""
    head = {"id": "text", "model": 'a "model"'}

    def data_of(index: int, text: str) -> dict[str, Any]:
        return head | {"choices": [{"index": index, "delta": {"content": text}, "logprobs": None}]}

    events = TextEvents(data_of)
    for index, text in texts:
        sent = events.event(index, text)
        assert sent == event(data_of(index, text)) and json.loads(sent[6:]) == data_of(index, text)


def lazily(data: Any) -> Any:
    """The same with iterators for lists."""
    if isinstance(data, dict):
        return {name: lazily(value) for name, value in data.items()}
    return map(lazily, data) if isinstance(data, list) else data


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=200, derandomize=True)
@given(data=JSON)
def test_json_in_pieces(data: Any) -> None:
    """Would break: arrays in each other's places, a comma too many."""
    written = b"".join(json_pieces(lazily(data)))
    assert json.loads(written) == data and written == b"".join(json_pieces(data))
    assert event(lazily(data)) == event(data) == b"".join(event_pieces(lazily(data)))


def test_json_is_written_as_it_is_made() -> None:
    """Would break: an answer of which all is held, and made in one turn of the event loop."""
    taken: list[int] = []

    def items() -> Iterator[dict[str, Any]]:
        for number in range(1000):
            taken.append(number)
            yield {"text": "a" * 1000, "parts": iter([number])}

    async def read() -> list[tuple[int, bytes]]:
        return [(len(taken), piece) async for piece in joined(json_pieces({"items": items()}))]

    pieces = asyncio.run(read())
    assert [number for number, _ in pieces[:3]] == [64, 128, 192] and len(pieces) == 16
    assert len(json.loads(b"".join(piece for _, piece in pieces))["items"]) == 1000


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.num_decoded = tokenizer, 0

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        self.num_decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, **options)


@pytest.mark.parametrize("make", [bytewise, tiny_tokenizer])
def test_bytes_of_no_character_are_linear(make: Any) -> None:
    """Would break: a text of them that is decoded from its beginning with each one."""
    tokenizer = make()
    (last, *_) = tokenizer("日", add_special_tokens=False)["input_ids"]
    for ids in ([last] * 3000, [*[last] * 50, *tokenizer("日 the", add_special_tokens=False)["input_ids"]]):
        counting = Counting(tokenizer)
        detokenizer = Detokenizer(counting)
        pieces = [detokenizer.feed([token_id]) for token_id in ids]
        assert "".join(pieces) and "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(ids)
        assert counting.num_decoded < 40 * len(ids)


def test_tokens_are_named_once() -> None:
    """Would break: a call of the tokenizer for each of a million log-probabilities."""
    counting = Counting(tiny_tokenizer())
    names = TokenNames(counting)
    said = [TokenLogprobs(5, -1.0, [(6, -2.0), (7, float("nan"))])] * 100
    whole = {
        "chat": names.chat(said),
        "completion": names.completion(said, 0, True),
        "echoed": names.echoed([5], said[:1], 2, True),
    }
    found = json.loads(b"".join(json_pieces(whole)))
    assert counting.num_decoded <= 6 and len(found["chat"]["content"]) == 100
    assert found["chat"]["content"][0]["top_logprobs"][1]["logprob"] == LEAST
