"""`create_app`: a model as a FastAPI app."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from hf_paged import Engine, needs, patch
from hf_paged.server import adapters, chat, completions, responses, transcriptions
from hf_paged.server.chat_schemas import ChatRequest, TokenizeRequest
from hf_paged.server.description import body_of, describe, docs, openapi
from hf_paged.server.errors import ApiError, add_handlers
from hf_paged.server.logs import RequestLog
from hf_paged.server.metrics import CONTENT_TYPE
from hf_paged.server.pictures import limits_of
from hf_paged.server.schemas import Body, CompletionRequest, DetokenizeRequest
from hf_paged.server.serving import DOCS, OPENAPI, Handler, Serving
from hf_paged.server.settings import ServerSettings

BODIES: dict[str, type[Body]] = {
    chat.PATH: ChatRequest,
    completions.PATH: CompletionRequest,
    responses.PATH: responses.ResponsesRequest,
    transcriptions.TRANSCRIPTIONS: transcriptions.TranscriptionRequest,
    transcriptions.TRANSLATIONS: transcriptions.TranslationRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    adapters.LOAD: adapters.LoadAdapterRequest,
    adapters.UNLOAD: adapters.UnloadAdapterRequest,
}
logger = logging.getLogger("hf_paged.server")


def create_app(
    model: Any, tokenizer: Any, settings: ServerSettings | None = None, *, processor: Any = None, **more: Any
) -> FastAPI:
    """An app that speaks OpenAI's interface, to be run by uvicorn or mounted in another app.

    Its `state.requests` is a `RequestTable` of what clients have running.

    Args:
        model: A patched model, or one that is to be patched; with adapters of PEFT's, a `PeftModel` around it.
        tokenizer: Its tokenizer.
        settings: How it is run; `None`: as `ServerSettings()`.
        processor: What prepares pictures for the model; `None`: it is asked nothing about pictures.
        **more: Fields of `ServerSettings`, beside `settings`.

    Raises:
        UnsupportedModelError: The model can't be patched.
        ValueError: A setting isn't what it should be.
    """
    settings = replace(settings or ServerSettings(), **more)
    if not isinstance(getattr(model, "paged", None), Engine):
        patch(model)
    serving = Serving(model, tokenizer, settings, processor)
    if not serving.prompts.has_template and not model.config.is_encoder_decoder:
        logger.warning("%s has no chat template: chats are written line by line, role: content", serving.model_name)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        serving.close()

    app = FastAPI(title="hf_paged", lifespan=lifespan, openapi_url=None)  # the pages that describe it are our own
    app.state.serving = serving
    app.state.requests = serving.requests
    add_handlers(app)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(RequestLog, model_name=serving.model_name)
    routes: list[tuple[str, str, Handler]] = [
        ("POST", chat.PATH, chat.create),
        ("POST", completions.PATH, completions.create),
        ("POST", responses.PATH, responses.create),
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{name:path}", _model),
        ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
        ("GET", "/metrics", _metrics),
        ("GET", "/health", _health),
        ("GET", "/ready", _ready),
    ]
    if serving.ears is not None:
        with needs("hf-paged[audio]"):
            import_module("soundfile")
            import_module("python_multipart")
        routes += [
            ("POST", transcriptions.TRANSCRIPTIONS, transcriptions.transcribe),
            ("POST", transcriptions.TRANSLATIONS, transcriptions.translate),
        ]
    if settings.public_docs or not settings.api_keys:
        routes += [("GET", OPENAPI, openapi), ("GET", DOCS, docs)]
    if settings.adapter_dir is not None:
        with needs("peft"):
            import_module("peft")  # which knows an adapter's settings
        routes += [("POST", adapters.LOAD, adapters.load), ("POST", adapters.UNLOAD, adapters.unload)]
    for method, path, handle in routes:
        _add(app, serving, method, path, handle)
    describe(app, {path: kind for path, kind in BODIES.items() if path in {own for _, own, _ in routes}})
    return app


def _add(app: FastAPI, serving: Serving, method: str, path: str, handle: Handler) -> None:
    async def route(request: Request) -> Response:
        return await serving.answer(path, request, handle)

    limits = limits_of(serving.settings) if path in (chat.PATH, responses.PATH) else ""
    summary = (handle.__doc__ or "").split("\n")[0]
    extra = body_of(BODIES[path]) if path in BODIES else None
    app.add_api_route(
        path, route, methods=[method], name=path, summary=summary, description=limits, openapi_extra=extra
    )


async def _models(serving: Serving, _request: Request) -> Any:
    """The models that there are."""
    return {"object": "list", "data": [_described(serving, name) for name in serving.model_names]}


async def _model(serving: Serving, request: Request) -> Any:
    """One of them."""
    name = request.path_params["name"]
    if not serving.has(name):
        raise ApiError(404, f"there is no model {name!r:.200}", "model", "model_not_found")
    return _described(serving, name)


def _described(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "hf_paged",
        "max_model_len": serving.max_model_len,
        "parent": None if name == serving.model_name else serving.model_name,
    }


async def _tokenize(serving: Serving, request: Request) -> Any:
    """The tokens of a text or of a chat."""
    body = await serving.body(request, TokenizeRequest)
    prompts = serving.prompts
    if body.messages is not None:
        size = sum(message.num_characters for message in body.messages)
        chat = await serving.in_thread(prompts.of_chat, body.messages, body.add_generation_prompt, size=size)
        tokens = chat.token_ids
    elif body.prompt:
        tokens = await serving.in_thread(
            prompts.of_text, body.prompt, "prompt", body.add_special_tokens, size=len(body.prompt)
        )
    else:
        tokens = []
    return {"tokens": tokens, "count": len(tokens), "max_model_len": serving.max_model_len}


async def _detokenize(serving: Serving, request: Request) -> Any:
    """The text of tokens."""
    body = await serving.body(request, DetokenizeRequest)
    return {"prompt": await serving.in_thread(serving.prompts.text_of, body.tokens, size=4 * len(body.tokens))}


async def _metrics(serving: Serving, _request: Request) -> Any:
    """For Prometheus."""
    return Response(await serving.in_thread(serving.metrics.text), media_type=CONTENT_TYPE)


async def _health(_serving: Serving, _request: Request) -> Any:
    """Whether the process lives."""
    return {"status": "ok"}


async def _ready(serving: Serving, _request: Request) -> Any:
    """Whether it takes requests."""
    if serving.is_draining:
        return JSONResponse({"status": "draining"}, 503)
    return {"status": "ready"}
