"""OpenAI's agents: one that calls a function and then answers to a schema, streamed too; by chats and by responses."""

import asyncio
import os
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunContextWrapper,
    Runner,
    function_tool,
)
from agents.items import MessageOutputItem, ToolCallItem, ToolCallOutputItem
from openai import AsyncOpenAI
from pydantic import BaseModel, Field


class Guest(BaseModel):
    name: Literal["Ann", "Bob"]
    age: int = Field(ge=1, le=99)


@function_tool(is_enabled=lambda run, _: not run.context)  # once: where it may choose, the embedded model calls on
def open_door(run: RunContextWrapper[list[int]], number: Literal[1, 2, 3]) -> str:
    """Opens a door."""
    run.context.append(number)
    return "Nobody is there."


async def main() -> None:
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(os.environ["MODEL"], client)
        # The first turn is forced to call the function; in the second there is none, and the schema holds.
        # (Texts without a schema would be cut by the limit, which this SDK takes for an error.)
        forced = ModelSettings(temperature=0, max_tokens=100, tool_choice="required", parallel_tool_calls=False)
        porter = Agent(
            "Porter",
            instructions="You open doors.",
            model=model,
            model_settings=forced,
            tools=[open_door],
            output_type=Guest,
        )
        opened: list[int] = []
        whole = await Runner.run(porter, "Open a door.", context=opened, max_turns=2)
        assert [type(item) for item in whole.new_items] == [ToolCallItem, ToolCallOutputItem, MessageOutputItem]
        assert isinstance(whole.final_output, Guest) and whole.context_wrapper.usage.requests == 2
        again: list[int] = []
        streamed = Runner.run_streamed(porter, "Open a door.", context=again, max_turns=2)
        events = [event.type async for event in streamed.stream_events()]
        assert streamed.final_output == whole.final_output and events.count("run_item_stream_event") == 3
        assert len(opened) == 1 and again == opened
    await client.close()


asyncio.run(main())
