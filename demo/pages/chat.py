"""The chat tab."""

from __future__ import annotations

import html
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import gradio as gr

from demo.chat import Reply, describe, reply
from demo.generation import MAX_SEED, Sampling
from demo.hub import Hub, cancel
from demo.limits import RefusedError
from demo.pages.viewer import quietly
from demo.prompts import check_messages, openings
from demo.told import told

History = list[dict[str, Any]]


def chat_page(hub: Hub) -> None:
    """Builds the tab."""
    loaded = hub.loaded
    hint = "Say something" if loaded.has_chat_template else "Begin a story"
    chatbot = gr.Chatbot(
        elem_id="chat",
        show_label=False,
        height="max(300px, min(52vh, 560px))",
        buttons=[],  # copying would copy the escaped text
        feedback_options=None,
        layout="bubble",
        placeholder="Choose an opening, or write one. Each reply is a request in the batch that all visitors share.",
        examples=[{"text": text} for text in openings(loaded)],
        # What people and models write is shown as what it is, text. Gradio renders HTML even without Markdown: all
        # that goes in is escaped, and unescaped when it comes back.
        render_markdown=False,
        sanitize_html=True,
        allow_tags=False,
        latex_delimiters=[],
    )
    with gr.Row(equal_height=True):
        message = gr.Textbox(
            elem_id="chat-message", show_label=False, container=False, placeholder=hint, lines=1, max_lines=6, scale=8
        )
        send = gr.Button("Send", variant="primary", elem_id="chat-send", scale=1, min_width=90)
        stop = gr.Button("Stop", variant="stop", elem_id="chat-stop", scale=1, min_width=90, interactive=False)
    with gr.Accordion("How tokens are chosen", open=False, elem_id="chat-settings"):
        settings = sampling_controls(hub)

    page = _ChatHandlers(hub)
    outputs = [chatbot, message, send, stop]
    begin = quietly(
        trigger_mode="once", concurrency_limit=hub.limits.requests, concurrency_id="chat-page", outputs=outputs
    )
    replies = [
        gr.on([message.submit, send.click], page.send, [message, chatbot, *settings], **begin),
        chatbot.example_select(page.example, [chatbot, *settings], **begin),
        chatbot.retry(page.retry, [chatbot, *settings], **begin),
    ]
    for reply_event in replies:
        reply_event.then(at_rest, None, [send, stop], **quietly(queue=False))  # whatever became of it
    chatbot.undo(page.undo, [chatbot], [chatbot, message], **quietly())
    chatbot.clear(page.clear, None, None, **quietly(queue=False))
    stop.click(page.stop, None, None, **quietly(queue=False))


def at_rest() -> list[Any]:
    """For a button that starts something and one that stops it."""
    return [gr.Button(interactive=True), gr.Button(interactive=False)]


def sampling_controls(hub: Hub, new_tokens: int = 128) -> list[Any]:
    """Controls in the order of `Sampling.checked`."""
    with gr.Row():
        controls = [
            gr.Slider(
                1,
                hub.limits.new_tokens,
                min(new_tokens, hub.limits.new_tokens),
                step=1,
                label="New tokens, at most",
                elem_id="chat-new-tokens",
            ),
            gr.Slider(0, 2, 0.8, step=0.05, label="Temperature", info="0: always the likeliest token"),
        ]
    with gr.Row():
        controls += [
            gr.Slider(0.05, 1, 0.95, step=0.05, label="Top-p"),
            gr.Slider(0, 200, 0, step=1, label="Top-k", info="0: no limit"),
        ]
    with gr.Row():
        controls += [
            gr.Slider(1, 2, 1.1, step=0.05, label="Repetition penalty"),
            seed_control(),
        ]
    return controls


def seed_control() -> gr.Number:
    """A seed, or none."""
    return gr.Number(-1, precision=0, minimum=-1, maximum=MAX_SEED, label="Seed", info="-1: other draws each time")


class _ChatHandlers:
    """What happens when somebody clicks."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._unwanted: set[str] = set()  # replies to a conversation that was cleared meanwhile
        self.send = told(self._send)
        self.example = told(self._example)
        self.retry = told(self._retry)
        self.undo = told(self._undo)

    async def _send(
        self, request: gr.Request, message: str, history: History, *settings: Any
    ) -> AsyncIterator[list[Any]]:
        async for update in self._stream(history, message, settings, request):
            yield update

    async def _example(
        self, request: gr.Request, event: gr.SelectData, history: History, *settings: Any
    ) -> AsyncIterator[list[Any]]:
        async for update in self._stream(history, event.value["text"], settings, request):
            yield update

    async def _retry(
        self, request: gr.Request, event: gr.RetryData, history: History, *settings: Any
    ) -> AsyncIterator[list[Any]]:
        before, message = _before_last_question(history, event.index)
        async for update in self._stream(before, message, settings, request):
            yield update

    def _undo(self, event: gr.UndoData, history: History) -> list[Any]:
        return list(_before_last_question(history, event.index))

    def stop(self, request: gr.Request) -> None:
        self._hub.cancel(owner=_owner(request), kind="chat")

    def clear(self, request: gr.Request) -> None:
        tickets = self._hub.of(_owner(request), "chat")
        self._unwanted.update(ticket.label for ticket in tickets)
        cancel(*tickets)

    async def _stream(
        self, history: History, message: str, settings: tuple[Any, ...], request: gr.Request
    ) -> AsyncIterator[list[Any]]:
        hub, owner = self._hub, _owner(request)
        if hub.of(owner, "chat"):
            raise RefusedError("A reply is still running in this tab: stop it first, or open another tab.")
        sampling = Sampling.checked(hub.limits, *settings)
        messages = [*_unescaped(history), {"role": "user", "content": message}]
        shown = [*history, {"role": "user", "content": html.escape(message)}]
        current = None
        try:
            async with aclosing(reply(hub, owner, messages, sampling)) as replies:
                async for current in replies:
                    if current.label in self._unwanted:
                        yield [[], gr.skip(), *at_rest()]
                        return
                    line = describe(current, hub.pacer.steps_per_second > 0)
                    if current.finish_reason is None and hub.pacer.is_paused:
                        line += " · the engine is paused"
                    yield [[*shown, *_as_messages(current, line)], "", *_running()]
        except Exception:
            if current is not None:
                failed = replace(current, finish_reason="error")
                yield [[*shown, *_as_messages(failed, f"{current.label} failed")], "", *_running()]
            raise
        finally:
            if current is not None:
                self._unwanted.discard(current.label)


def _running() -> list[Any]:
    return [gr.Button(interactive=False), gr.Button(interactive=True)]


def _as_messages(current: Reply, line: str) -> History:
    """A reply and the line below it."""
    status = {"status": "pending"} if current.finish_reason is None else {}
    return [
        {"role": "assistant", "content": html.escape(current.text)},
        {"role": "assistant", "content": "", "metadata": {"title": line} | status},
    ]


def _before_last_question(history: History, index: Any) -> tuple[History, str]:
    """The history before the last message of the user's, at or before an index, and that message."""
    last = index[0] if isinstance(index, list | tuple) else index
    for position in range(min(last, len(history) - 1), -1, -1):
        if history[position]["role"] == "user":
            return history[:position], _unescaped([history[position]])[0]["content"]
    raise RefusedError("There is no message to go back to.")


def _unescaped(history: History) -> list[dict[str, str]]:
    """The conversation that the view shows."""
    return [{**message, "content": html.unescape(message["content"])} for message in check_messages(history)]


def _owner(request: gr.Request) -> str:
    return request.session_hash or "api"
