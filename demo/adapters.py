"""One prompt under several adapters, which are trained on the spot: requests of one batch, watched while they run."""

from __future__ import annotations

import asyncio
import copy
import tempfile
import threading
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .generation import Sampling
from .hub import Hub, Ticket, cancel
from .prompts import encode
from .run_record import RunRecord
from .samples import SHOW_SECONDS, Branch, Branches
from .streams import decode_reply, in_thread

BASE = "__base__"
STYLES = {
    "sailor": "The ship rolled on the dark sea, and the old sailor held the rope and looked to the stars. ",
    "cook": "The cook stirred the soup, cut the bread, and set the hot dish upon the long table. ",
}
STEPS = 15
TRAINING = "Two small adapters are being trained, each on one sentence: this takes some seconds, once."
_folder: tempfile.TemporaryDirectory[str] | None = None
_lock = threading.Lock()


def can_train(hub: Hub) -> bool:
    """Whether there is something to show: the embedded model, and PEFT."""
    return hub.loaded.is_tiny and find_spec("peft") is not None


async def voices(hub: Hub, owner: str, prompt: str, sampling: Sampling) -> AsyncIterator[Branches]:
    """The prompt by the model as it is, and under each adapter, side by side in one batch.

    Raises:
        RefusedError: It is beyond a limit.
    """
    hub.limits.check_text(prompt)
    prompt_ids = await asyncio.to_thread(encode, hub.loaded, prompt)
    yield Branches("the batch of adapters", sharing=TRAINING if _folder is None else "")
    await asyncio.to_thread(_make_known, hub)
    hub.limits.check_requests(len(hub.tickets), 1 + len(STYLES))
    given = {"prompt_ids": prompt_ids, "seed": sampling.seed, **sampling.arguments(hub.loaded)}
    requests = [given | {"adapter": name} for name in (BASE, *STYLES)]
    before = hub.stats().num_steps
    tickets: list[Ticket] = []
    try:
        tickets = await in_thread(lambda: hub.submit_all("adapter", owner, requests), lambda found: cancel(*found))
        record = RunRecord.begin(hub, tickets, sampling.max_new_tokens)
        results = asyncio.gather(*(ticket.request for ticket in tickets), return_exceptions=True)
        while not results.done():
            record.see(hub.snapshot())
            yield _seen(hub, tickets, before)
            await asyncio.wait([results], timeout=SHOW_SECONDS)
    finally:
        cancel(*tickets)
    outputs = [ticket.request.result(0) for ticket in tickets]
    record.end(outputs)
    is_whole = all(output.finish_reason != "cancelled" for output in outputs)
    yield _seen(hub, tickets, before, record if is_whole else None, is_done=True)


def _seen(
    hub: Hub, tickets: list[Ticket], before: int, record: RunRecord | None = None, is_done: bool = False
) -> Branches:
    branches = []
    for name, ticket in zip((BASE, *STYLES), tickets, strict=True):
        tokens = [event.token_id for event in ticket.request.events_since()]
        text = decode_reply(hub.loaded.tokenizer, ticket.request.prompt_token_ids, tokens)
        title = "the model as it is" if name == BASE else f"adapter: {name}"
        branches.append(Branch(title, text, f"{ticket.label} · {len(tokens)} tokens"))
    steps = hub.stats().num_steps - before
    sharing = f"{len(tickets)} requests in the same {steps} steps; each row has its own adapter added, or none."
    return Branches("the batch of adapters", branches, sharing, record=record, is_done=is_done)


def _make_known(hub: Hub) -> None:
    """Trains the adapters, if they were not yet, and loads them, if this engine does not have them yet."""
    global _folder
    with _lock:
        if _folder is None:
            _folder = _trained(hub)
        for name in STYLES:
            try:
                hub.engine.check_adapters([name])
            except ValueError:
                hub.engine.load_adapter(name, Path(_folder.name) / name)


def _trained(hub: Hub) -> tempfile.TemporaryDirectory[str]:
    """A folder of adapters as PEFT saves them."""
    from peft import LoraConfig, get_peft_model

    settings: dict[str, Any] = {"r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    model: Any = copy.deepcopy(hub.loaded.twin)
    folder = tempfile.TemporaryDirectory(prefix="hf_paged_demo_")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for number, (name, text) in enumerate(STYLES.items()):
            if number == 0:
                model = get_peft_model(model, LoraConfig(**settings), adapter_name=name)
            else:
                model.add_adapter(name, LoraConfig(**settings))
            model.set_adapter(name)
            ids = torch.tensor([hub.loaded.tokenizer(text * 3)["input_ids"]], device=model.device)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
            for _ in range(STEPS):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    model.save_pretrained(folder.name)
    return folder
