"""`told` and `raised`: what goes wrong in a handler is told to the visitor who caused it, as text."""

from __future__ import annotations

import functools
import html
import inspect
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import gradio as gr

from .limits import RefusedError

logger = logging.getLogger("demo")
SHOWN_SECONDS = 12.0


def told(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of a click, with what goes wrong shown in the page.

    A refusal is shown as its sentence, and leaves all components as they are. Anything else is a bug, or the machine's:
    it is shown too, and logged. The event must be queued: otherwise Gradio does not show it.
    """

    def fail(error: Exception) -> Any:
        if not isinstance(error, RefusedError):
            raise as_error(error) from None
        gr.Warning(as_text(str(error)), duration=SHOWN_SECONDS, title="Not done")
        return gr.skip()

    return _wrapped(handler, fail)


def raised(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The function of an API endpoint, whose refusals and failures reach the client as errors."""

    def fail(error: Exception) -> Any:
        raise as_error(error) from None

    return _wrapped(handler, fail)


def as_error(error: Exception) -> gr.Error:
    """An error as Gradio sends it."""
    if isinstance(error, gr.Error):
        return error
    if isinstance(error, RefusedError):
        return gr.Error(as_text(str(error)), duration=SHOWN_SECONDS, title="Not done", print_exception=False)
    logger.error("a handler failed", exc_info=error)
    message = as_text(f"{type(error).__name__}: {error}")
    return gr.Error(message, duration=None, title="This failed", print_exception=False)


def as_text(message: str) -> str:
    """A message for Gradio, which takes it for HTML."""
    return html.escape(message if len(message) <= 600 else message[:600] + "…", quote=False)


def _wrapped(handler: Callable[..., Any], fail: Callable[[Exception], Any]) -> Callable[..., Any]:
    """The handler (a function, a coroutine function or an async generator), with `fail` for its errors."""
    if inspect.isasyncgenfunction(handler):

        @functools.wraps(handler)
        async def stream(*args: Any, **kwargs: Any) -> Any:
            try:
                async with aclosing(handler(*args, **kwargs)) as items:
                    async for item in items:
                        yield item
            except Exception as error:
                yield fail(error)  # a stream of nothing would empty all components

        return stream

    if inspect.iscoroutinefunction(handler):

        @functools.wraps(handler)
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await handler(*args, **kwargs)
            except Exception as error:
                return fail(error)

        return call

    @functools.wraps(handler)
    def plain(*args: Any, **kwargs: Any) -> Any:
        try:
            return handler(*args, **kwargs)
        except Exception as error:
            return fail(error)

    return plain
