"""Text from tokens as they come."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny_tokenizer

from hf_paged.server.text import UNKNOWN, Detokenizer, StopStrings


@settings(max_examples=200, deadline=None, derandomize=True)
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


@settings(max_examples=500, deadline=None, derandomize=True)
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
