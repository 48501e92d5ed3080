"""OpenAI's own client: chats, completions and responses, plain and streamed; a forced call, a schema, a wrong key."""

import asyncio
import json
import os
from typing import Literal

import openai
from pydantic import BaseModel, Field

MODEL = os.environ["MODEL"]
client = openai.OpenAI(base_url=os.environ["BASE_URL"], max_retries=0)
settings = {"model": MODEL, "temperature": 0}
messages = [{"role": "system", "content": "You tell stories."}, {"role": "user", "content": "Who was at the door?"}]


class Guest(BaseModel):
    name: Literal["Ann", "Bob"]
    age: int = Field(ge=1, le=99)


assert [model.id for model in client.models.list()] == [MODEL]

chat = client.chat.completions.create(**settings, messages=messages, max_completion_tokens=20)
chunks = list(
    client.chat.completions.create(
        **settings, messages=messages, max_completion_tokens=20, stream=True, stream_options={"include_usage": True}
    )
)
assert chat.choices[0].finish_reason == "length" and chat.usage.completion_tokens == 20
assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == (
    chat.choices[0].message.content
)
assert chunks[-1].usage == chat.usage

completion = client.completions.create(**settings, prompt=["The door", "A ship"], max_tokens=8, logprobs=2)
assert len(completion.choices) == 2 and all(len(each.logprobs.tokens) == 8 for each in completion.choices)

tool = openai.pydantic_function_tool(Guest)
with client.chat.completions.stream(
    **settings, messages=messages, tools=[tool], tool_choice="required", parallel_tool_calls=False
) as events:
    (streamed,) = events.get_final_completion().choices[0].message.tool_calls
assert isinstance(streamed.function.parsed_arguments, Guest)
named = {"type": "function", "function": {"name": "Guest"}}
called = client.chat.completions.create(**settings, messages=messages, tools=[tool], tool_choice=named)
message = called.choices[0].message
(call,) = message.tool_calls
assert Guest.model_validate_json(call.function.arguments)
turns = [*messages, message, {"role": "tool", "tool_call_id": call.id, "content": "Nobody."}]
assert client.chat.completions.create(**settings, messages=turns, max_tokens=5).choices[0].message.content

parsed = client.chat.completions.parse(**settings, messages=messages, response_format=Guest)
assert isinstance(parsed.choices[0].message.parsed, Guest)

response = client.responses.create(**settings, input="Who was at the door?", max_output_tokens=20)
events = list(client.responses.create(**settings, input="Who was at the door?", max_output_tokens=20, stream=True))
assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == response.output_text
assert isinstance(client.responses.parse(**settings, input="Who?", text_format=Guest).output_parsed, Guest)


async def several() -> None:
    async with openai.AsyncOpenAI(base_url=os.environ["BASE_URL"]) as own:
        texts = [own.completions.create(**settings, prompt="The door", max_tokens=8) for _ in range(8)]
        assert len({text.choices[0].text for text in await asyncio.gather(*texts)}) == 1


asyncio.run(several())
try:
    openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="wrong").models.list()
except openai.AuthenticationError as error:
    assert json.loads(error.response.text)["error"]["message"]
else:
    raise AssertionError("a wrong key was taken")
