"""Adapters that clients load and unload while a server runs, from one folder; the two paths are vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field

from hf_paged.server.errors import ApiError, bad_field
from hf_paged.server.schemas import Body
from hf_paged.server.serving import Serving

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^\S(.*\S)?$")]


class LoadAdapterRequest(Body):
    """The body of `/v1/load_lora_adapter`: an adapter that becomes a model of its own."""

    lora_name: Name = Field(description="what requests call it, as their `model`")
    lora_path: str = Field(min_length=1, max_length=4096, description="its folder, inside the server's `--adapter-dir`")


class UnloadAdapterRequest(Body):
    """The body of `/v1/unload_lora_adapter`: an adapter that is a model no more; requests that have it go on."""

    lora_name: Name


async def load(serving: Serving, request: Request) -> Any:
    """An adapter becomes a model of its own."""
    body = await serving.body(request, LoadAdapterRequest)
    await serving.in_turn(_load, serving, body)
    return {"status": "ok", "id": body.lora_name, "parent": serving.model_name}


async def unload(serving: Serving, request: Request) -> Any:
    """An adapter is a model no more."""
    name = (await serving.body(request, UnloadAdapterRequest)).lora_name
    await serving.in_turn(_unload, serving, name)
    return {"status": "ok", "id": name}


def _load(serving: Serving, body: LoadAdapterRequest) -> None:
    _, *others = serving.model_names
    if serving.has(body.lora_name):
        raise bad_field("lora_name", f"there is a model {body.lora_name!r} already: unload it, or take another name")
    if len(others) >= serving.settings.max_adapters:
        raise bad_field("lora_name", f"there are {len(others)} adapters, the most that this server takes: unload some")
    folder = inside(serving.settings.adapter_dir or "", body.lora_path)
    try:
        serving.engine.load_adapter(body.lora_name, folder)
    except ValueError as error:
        raise bad_field("lora_path", str(error).replace(str(folder), body.lora_path)) from None
    serving.note_adapters([*others, body.lora_name])


def _unload(serving: Serving, name: str) -> None:
    try:
        serving.engine.unload_adapter(name)
    except ValueError as error:
        raise ApiError(404, f"lora_name: {error}", "lora_name", "model_not_found") from None
    serving.note_adapters([each for each in serving.model_names[1:] if each != name])


def inside(directory: str | Path, path: str) -> Path:
    """A folder of adapters' directory, and it alone: neither `..` nor a link leads out.

    Raises:
        ApiError: One does, or there is no such folder.
    """
    root = Path(directory).resolve()
    try:
        found = (root / path).resolve(strict=True)
        if found.is_relative_to(root) and all(each.resolve().is_relative_to(root) for each in found.iterdir()):
            return found
    except (OSError, ValueError, RuntimeError):  # none of this name, a name that none is, links in a circle
        pass
    raise bad_field("lora_path", f"{path!r:.200} is no folder inside this server's folder of adapters")
