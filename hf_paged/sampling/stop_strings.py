"""`StopStringTables`: what transformers computes of a whole vocabulary for each call's stop strings, computed once."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import StopStringCriteria

MAX_TABLES = 8  # of each tokenizer; one has a row of some numbers for every token


class StopStringTables:
    """Criteria by tokenizer and strings, for any thread. Tokenizers are held weakly.

    transformers keeps them, too, but finds none again: a fast tokenizer names its vocabulary in another order each time
    it is asked, and the order is part of the key.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kept: WeakKeyDictionary[Any, OrderedDict[Hashable, StopStringCriteria]] = WeakKeyDictionary()

    def criterion(self, tokenizer: Any, stop_strings: Any, device: torch.device) -> StopStringCriteria | None:
        """The criterion that transformers would make, with shared tables on `device`.

        Returns:
            `None` for what transformers had better make itself: tokenizers in plain Python, strings that are none.

        Raises:
            ValueError: No token of the vocabulary matches any of the strings.
        """
        strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not strings or not all(isinstance(string, str) for string in strings):
            return None
        # What of a tokenizer can change, without asking for its vocabulary, which takes a tenth of a second.
        added = tuple((token_id, token.content) for token_id, token in tokenizer.added_tokens_decoder.items())
        decoder = None if backend.decoder is None else backend.decoder.__getstate__()
        key = strings, device, backend, tokenizer.vocab_size, tuple(sorted(added)), decoder
        with self._lock:
            kept = self._kept.setdefault(tokenizer, OrderedDict())
            if key not in kept:
                with torch.inference_mode(False):  # for later calls, outside of it
                    kept[key] = StopStringCriteria(tokenizer, list(strings))
                    kept[key].embedding_vec = kept[key].embedding_vec.to(device)
                    kept[key].target_lens = kept[key].target_lens.to(device)
                if len(kept) > MAX_TABLES:
                    kept.popitem(last=False)
            kept.move_to_end(key)
            return copy.copy(kept[key])
