"""The description of the interface: `/openapi.json` for programs, and `/docs`, a page that is made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from jinja2 import Environment, Template
from pydantic.json_schema import models_json_schema
from starlette.responses import HTMLResponse

from hf_paged.server.schemas import Body
from hf_paged.server.serving import Serving

SCHEMAS = "#/components/schemas/"
ALONE = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}  # the page loads nothing


def body_of(kind: type[Body]) -> dict[str, Any]:
    """The part of a route's description that is about a request's body."""
    schema = {"$ref": SCHEMAS + kind.__name__}
    media_type = "multipart/form-data" if "file" in kind.model_fields else "application/json"
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def describe(app: FastAPI, bodies: Mapping[str, type[Body]]) -> None:
    """Adds the schemas of requests to an app's description.

    Args:
        bodies: By path.
    """
    without = app.openapi

    @cache
    def openapi() -> dict[str, Any]:
        kinds = [(kind, "validation") for kind in bodies.values()]
        _, found = models_json_schema(kinds, ref_template=SCHEMAS + "{model}")  # type: ignore[arg-type]
        schemas = {name: schema | {"description": _prose(schema)} for name, schema in found["$defs"].items()}
        return without() | {"components": {"schemas": schemas}}

    app.openapi = openapi  # type: ignore[method-assign]


def _prose(schema: Mapping[str, Any]) -> str:
    """The first paragraph of a docstring; the others are about attributes in Python."""
    return schema.get("description", "").split("\n\n")[0]


@cache
def _template() -> Template:
    text = Path(__file__).with_name("docs.html.jinja").read_text(encoding="utf-8")
    return Environment(autoescape=True).from_string(text)


async def openapi(_serving: Serving, request: Request) -> Any:
    """The description of this interface, for programs."""
    return request.app.openapi() | {"servers": [{"url": request.scope.get("root_path") or "/"}]}


async def docs(serving: Serving, request: Request) -> Any:
    """The description of this interface, to be read."""
    api = request.app.openapi()
    routes = [route for methods in api["paths"].values() for route in methods.values() if "requestBody" in route]
    contents = [content for route in routes for content in route["requestBody"]["content"].values()]
    schemas = [content["schema"]["$ref"] for content in contents]
    page = _template().render(
        api=api,
        bodies=[schema.removeprefix(SCHEMAS) for schema in schemas],
        root=request.scope.get("root_path", ""),
        url=str(request.base_url).rstrip("/"),
        has_key=bool(serving.settings.api_keys),
        json=json.dumps,
    )
    return HTMLResponse(page, headers=ALONE)
