"""`load`: model and tokenizer by name or folder, with one sentence in place of a traceback where that fails."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LoadError(ValueError):
    """The model can't be loaded; the message says why."""


@dataclass(frozen=True)
class LoadedModel:
    """A model, its tokenizer, and a stock twin.

    Attributes:
        name: What to call it.
        model: The model, to be patched.
        twin: The same weights (the very tensors) behind modules and a config of their own: runs stock `generate()`
            while `model` is patched.
        tokenizer: The tokenizer.
        is_tiny: Whether it is the embedded story model.
    """

    name: str
    model: Any
    twin: Any
    tokenizer: Any
    is_tiny: bool

    @property
    def has_chat_template(self) -> bool:
        """Whether it was trained to chat; otherwise it goes on with a text."""
        return bool(self.tokenizer.chat_template)

    @property
    def positions(self) -> int | None:
        """Tokens that the model can see, if it says so."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def pad_token_id(self) -> int:
        """What fills up rows of a batch."""
        return int(self.tokenizer.pad_token_id)

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a text."""
        eos = self.model.generation_config.eos_token_id
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def load(name: str | None = None, dtype: str = "auto", device: str = "") -> LoadedModel:
    """Loads a model.

    Args:
        name: A folder or the name of a model on the hub; `None`: the embedded story model.
        dtype: A key of `DTYPES`. `"auto"`: float32 on CPU for the embedded model, else as the model was saved.
        device: Such as `"cpu"` or `"cuda:0"`; empty: CUDA where there is one.

    Raises:
        LoadError: It can't be loaded; the message is one sentence.
    """
    is_tiny = name is None or Path(name).expanduser().absolute() == TINY_MODEL
    source = str(TINY_MODEL) if name is None else name
    folder = Path(source).expanduser()
    if dtype not in DTYPES:
        raise LoadError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise LoadError(f"the folder {source} holds no model: it has no config.json")
    if not folder.is_dir() and source.startswith((".", "/", "~")):
        raise LoadError(f"there is no folder {source}")
    if folder.is_dir():
        source = str(folder)
    place = _device(device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32 if is_tiny and dtype == "auto" else DTYPES[dtype]
        )
        model = model.to(place).eval()
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise LoadError(f"cannot load the model {source!r}: {reason}") from None
    except RuntimeError as error:  # weights of other shapes, a device without room
        raise LoadError(f"cannot load the model {source!r}: {str(error).splitlines()[0]}") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        raise LoadError(f"the tokenizer of {source!r} has neither a padding token nor one that ends a text")
    title = "the embedded story model" if is_tiny else folder.name if folder.is_dir() else source
    return LoadedModel(title, model, _twin(model), tokenizer, is_tiny)


def _twin(model: Any) -> Any:
    """A copy of the modules around the very same weights."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def _device(name: str) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise LoadError(f"cannot use --device {name!r}: {str(error).splitlines()[0]}") from None
