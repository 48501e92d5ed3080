"""The tables behind stop strings: made once a tokenizer and strings, and never another's."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from transformers import MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation import stopping_criteria

import hf_paged
from helpers.models import tiny_lm, tiny_tokenizer
from hf_paged.sampling.stop_strings import MAX_TABLES, StopStringTables

CPU = torch.device("cpu")
STOP = {"stop_strings": ["e,", "d the", "he was", "."], "max_new_tokens": 40, "do_sample": False}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Grows by the strings of every vocabulary's table that is computed."""
    computed: list[tuple[str, ...]] = []
    own = StopStringCriteria.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        computed.append(self.stop_strings)

    monkeypatch.setattr(StopStringCriteria, "__init__", init)
    return computed


def tokenizer() -> Any:
    return copy.deepcopy(tiny_tokenizer())


def test_tables_are_made_once(made: list[tuple[str, ...]]) -> None:
    stock, model, own = tiny_lm(), hf_paged.patch(tiny_lm(), num_blocks=256), tokenizer()
    prompts = own(["It was", "He said that", "The door", "Once upon a time"])["input_ids"]
    found = [output.token_ids for output in model.paged.generate(prompts, tokenizer=own, **STOP)]
    assert len(made) == 1
    calls = [model.generate(torch.tensor([ids]), tokenizer=own, **STOP)[0, len(ids) :].tolist() for ids in prompts]
    assert len(made) == 1
    expected = [stock.generate(torch.tensor([ids]), tokenizer=own, **STOP)[0, len(ids) :].tolist() for ids in prompts]
    assert found == calls == expected and len({len(tokens) for tokens in found}) > 1


def test_the_criteria_are_transformers_own(made: list[tuple[str, ...]]) -> None:
    stock, model, own = tiny_lm(), hf_paged.patch(tiny_lm()), tokenizer()
    theirs = StopStringCriteria(own, ["other"])
    for given in ([], [MaxTimeCriteria(5.0)], [theirs]):
        config = copy.deepcopy(model.generation_config)
        config.update(max_length=20, max_time=9.0, stop_strings=["e,", "he was"])
        config._eos_token_tensor = torch.tensor([1])
        lists = [
            one._get_stopping_criteria(
                generation_config=config, stopping_criteria=StoppingCriteriaList(given), tokenizer=own
            )
            for one in (stock, model)
        ]
        assert [type(item) for item in lists[0]] == [type(item) for item in lists[1]]
        assert [item in given for item in lists[0]] == [item in given for item in lists[1]]
        assert config.stop_strings == ["e,", "he was"]
        for one, other in zip(*lists):
            for name, value in vars(one).items():
                same = value if name == "initial_timestamp" else getattr(other, name)
                assert torch.equal(value, same) if isinstance(value, torch.Tensor) else value == same, name


def test_a_tokenizer_that_changes_gets_other_tables(made: list[tuple[str, ...]]) -> None:
    tables, own = StopStringTables(), tokenizer()
    one = tables.criterion(own, ["the", "he"], CPU)
    assert one is not tables.criterion(own, ("the", "he"), CPU) and len(made) == 1
    own.add_tokens(["<the>"])
    other = tables.criterion(own, ["the", "he"], CPU)
    assert one is not None and other is not None and len(made) == 2
    assert len(other.embedding_vec) == len(one.embedding_vec) + 1
    again = copy.deepcopy(own)
    tables.criterion(again, ["the", "he"], CPU)
    assert len(made) == 3, "another tokenizer"


def test_tables_are_bounded_and_go_with_their_tokenizer(made: list[tuple[str, ...]]) -> None:
    tables, own = StopStringTables(), tokenizer()
    kept = weakref.ref(tables.criterion(own, "a", CPU).embedding_vec)  # type: ignore[union-attr]
    for string in "bcdefghi"[: MAX_TABLES - 1]:
        tables.criterion(own, string, CPU)
    assert kept() is not None
    tables.criterion(own, "z", CPU)
    stopping_criteria.STOP_STRING_EMBEDDING_CACHE.clear()  # transformers' own
    assert kept() is None
    kept, alive = weakref.ref(tables.criterion(own, "z", CPU).embedding_vec), weakref.ref(own)  # type: ignore
    stopping_criteria.STOP_STRING_EMBEDDING_CACHE.clear()
    del own
    gc.collect()
    assert kept() is None and alive() is None


def test_threads_compute_them_once(made: list[tuple[str, ...]]) -> None:
    tables, own, found = StopStringTables(), tokenizer(), []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        found.append(tables.criterion(own, ["the"], CPU))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and len({id(own) for own in found}) == 8


def test_made_in_inference_mode_they_serve_outside() -> None:
    tables, own = StopStringTables(), tokenizer()
    with torch.inference_mode():
        criterion = tables.criterion(own, "the", CPU)
    assert criterion is not None and not criterion.embedding_vec.is_inference()


def test_what_fails_fails_each_time() -> None:
    stock, model, own = tiny_lm(), hf_paged.patch(tiny_lm()), tokenizer()
    ids = torch.tensor([[5, 6, 7]])
    for strings in ([], [1], "", None, [""]):
        outcomes: list[Any] = []
        for one in (stock, model, model):
            try:
                outcomes.append(one.generate(ids, stop_strings=strings, tokenizer=own, max_new_tokens=3).tolist())
            except Exception as error:
                outcomes.append((type(error), str(error)))
        assert outcomes[0] == outcomes[1] == outcomes[2], strings
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(ids, stop_strings=["x"])
