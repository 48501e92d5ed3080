"""The chat tab."""

from __future__ import annotations

import html
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import gradio as gr

from ..chat import describe, reply
from ..generation import MAX_SEED, Sampling
from ..hub import Hub, cancel
from ..limits import RefusedError
from ..prompts import openings
from ..told import told
from .viewer import owner_of, quietly


@dataclass(frozen=True)
class Message:
    """A message of a conversation.

    Attributes:
        role: `"user"` or `"assistant"`.
        content: Its text.
        note: What a reply took.
        is_running: Whether it is still being written.
    """

    role: str
    content: str
    note: str = ""
    is_running: bool = False


Conversation = list[Message]

# In the browser, which alone knows what the box holds now: what was sent leaves it, what was typed since then stays.
TAKE_SENT = """(typed, sent) => {
  document.querySelector("#chat [role=log]").isAway = false
  return sent && typed.startsWith(sent[1]) ? typed.slice(sent[1].length) : typed
}"""
# The view stays at the end of a growing reply until it is scrolled up. Gradio's own autoscroll comes 300 ms after each
# piece, wherever the view was scrolled to meanwhile.
FOLLOW = """() => requestAnimationFrame(() => {
  const log = document.querySelector("#chat [role=log]")
  log.onscroll ??= () => {
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 30
    log.isAway = !isAtEnd && (log.isAway || log.scrollTop < log.before)
    log.before = log.scrollTop
  }
  if (!log.isAway) log.scrollTop = log.scrollHeight
})"""


def chat_page(hub: Hub) -> gr.Textbox:
    """Builds the tab, and returns the box in which a message is written."""
    loaded = hub.loaded
    hint = "Say something" if loaded.has_chat_template else "Begin a story"
    chatbot = gr.Chatbot(
        elem_id="chat",
        show_label=False,
        height="max(300px, min(52vh, 560px))",
        buttons=[],  # copying would copy the escaped text
        feedback_options=None,
        layout="bubble",
        autoscroll=False,  # see `FOLLOW`
        placeholder="Choose an opening, or write one. Each reply is a request in the batch that all visitors share.",
        examples=[{"text": text} for text in openings(loaded)],
        # What people and models write is shown as what it is, text. Gradio renders HTML even without Markdown: all
        # that goes in is escaped.
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

    conversation = gr.State([])  # what the view shows; Gradio changes white space in what it is given
    chatbot.change(None, js=FOLLOW, **quietly(queue=False))
    sent = gr.JSON(visible="hidden")  # a number, and the message that was accepted
    sent.change(None, [message, sent], message, js=TAKE_SENT, **quietly(queue=False))
    page = _ChatHandlers(hub)
    begin = quietly(trigger_mode="once", concurrency_limit=hub.limits.requests, concurrency_id="chat-page")
    shown = [chatbot, conversation, send, stop]
    replies = [
        gr.on([message.submit, send.click], page.send, [message, conversation, *settings], [*shown, sent], **begin),
        chatbot.example_select(page.example, settings, shown, **begin),
        chatbot.retry(page.retry, [conversation, *settings], shown, **begin),
    ]
    for reply_event in replies:
        reply_event.then(at_rest, None, [send, stop], **quietly(queue=False))  # whatever became of it
    chatbot.undo(page.undo, [conversation, message], [chatbot, conversation, message], **quietly())
    chatbot.clear(page.clear, None, conversation, **quietly(queue=False))
    stop.click(page.stop, None, None, **quietly(queue=False))
    return message


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
    """What happens at a click."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._unwanted: set[str] = set()  # replies to a conversation that was cleared meanwhile
        self._sends = itertools.count()  # the same message sent twice is two values
        self.send = told(self._send)
        self.example = told(self._example)
        self.retry = told(self._retry)
        self.undo = told(self._undo)

    async def _send(
        self, request: gr.Request, message: str, before: Conversation, *settings: Any
    ) -> AsyncIterator[list[Any]]:
        sent: Any = [next(self._sends), message]
        async for update in self._stream(request, before, message, settings):
            yield [*update, sent]
            sent = gr.skip()

    async def _example(self, request: gr.Request, event: gr.SelectData, *settings: Any) -> AsyncIterator[list[Any]]:
        async for update in self._stream(request, [], event.value["text"], settings):
            yield update

    async def _retry(self, request: gr.Request, conversation: Conversation, *settings: Any) -> AsyncIterator[list[Any]]:
        before, message = before_last_question(conversation)
        async for update in self._stream(request, before, message, settings):
            yield update

    def _undo(self, conversation: Conversation, typed: str) -> list[Any]:
        before, message = before_last_question(conversation)
        return [as_shown(before), before, gr.skip() if typed.strip() else message]

    def stop(self, request: gr.Request) -> None:
        self._hub.cancel(owner=owner_of(request), kind="chat")

    def clear(self, request: gr.Request) -> Conversation:
        tickets = self._hub.of(owner_of(request), "chat")
        self._unwanted.update(ticket.label for ticket in tickets)
        cancel(*tickets)
        return []

    async def _stream(
        self, request: gr.Request, before: Conversation, message: str, settings: tuple[Any, ...]
    ) -> AsyncIterator[list[Any]]:
        hub, owner = self._hub, owner_of(request)
        if hub.of(owner, "chat"):
            raise RefusedError("A reply is still running in this tab: stop it first, or open another tab.")
        sampling = Sampling.checked(hub.limits, *settings)
        asked = [*before, Message("user", message)]
        current = None
        try:
            async with aclosing(reply(hub, owner, _as_messages(asked), sampling)) as replies:
                async for current in replies:
                    if current.label in self._unwanted:
                        yield [[], [], *at_rest()]
                        return
                    line = describe(current, hub.pacer.steps_per_second > 0)
                    is_running = current.finish_reason is None
                    if is_running and hub.pacer.is_paused:
                        line += " · the engine is paused"
                    yield self._update([*asked, Message("assistant", current.text, line, is_running)])
        except Exception:
            if current is not None:
                yield self._update([*asked, Message("assistant", current.text, f"{current.label} failed")])
            raise
        finally:
            if current is not None:
                self._unwanted.discard(current.label)

    @staticmethod
    def _update(conversation: Conversation) -> list[Any]:
        return [as_shown(conversation), conversation, gr.Button(interactive=False), gr.Button(interactive=True)]


def as_shown(conversation: Conversation) -> list[dict[str, Any]]:
    """As the view takes it: escaped, and with what a reply took below it."""
    shown: list[dict[str, Any]] = []
    for message in conversation:
        shown.append({"role": message.role, "content": html.escape(message.content)})
        if message.note:
            metadata = {"title": message.note} | ({"status": "pending"} if message.is_running else {})
            shown.append({"role": message.role, "content": "", "metadata": metadata})
    return shown


def before_last_question(conversation: Conversation) -> tuple[Conversation, str]:
    """The conversation before the user's last message, and that message."""
    for position in range(len(conversation) - 1, -1, -1):
        if conversation[position].role == "user":
            return conversation[:position], conversation[position].content
    raise RefusedError("There is no message to go back to.")


def _as_messages(conversation: Conversation) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in conversation]
