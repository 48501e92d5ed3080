"""OpenAI's own client: chats, completions and responses, plain and streamed; forced calls, a schema, a wrong key."""

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

own = settings | {"messages": messages, "max_completion_tokens": 20}
chat = client.chat.completions.create(**own)
chunks = list(client.chat.completions.create(**own, stream=True, stream_options={"include_usage": True}))
text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
assert chat.choices[0].message.content == text and chat.choices[0].finish_reason == "length"
assert chat.usage.completion_tokens == 20 and chunks[-1].usage == chat.usage

completion = client.completions.create(**settings, prompt=["The door", "A ship"], max_tokens=8, logprobs=2)
assert len(completion.choices) == 2 and all(len(each.logprobs.tokens) == 8 for each in completion.choices)

own = settings | {"messages": messages, "tools": [openai.pydantic_function_tool(Guest)]}
with client.chat.completions.stream(**own, tool_choice="required", parallel_tool_calls=False) as events:
    (streamed,) = events.get_final_completion().choices[0].message.tool_calls
assert isinstance(streamed.function.parsed_arguments, Guest)
named = {"type": "function", "function": {"name": "Guest"}}
message = client.chat.completions.create(**own, tool_choice=named).choices[0].message
(call,) = message.tool_calls
assert Guest.model_validate_json(call.function.arguments) == streamed.function.parsed_arguments
turns = [*messages, message, {"role": "tool", "tool_call_id": call.id, "content": "Nobody."}]
assert client.chat.completions.create(**settings, messages=turns, max_tokens=5).choices[0].message.content
parsed = client.chat.completions.parse(**settings, messages=messages, response_format=Guest)
assert isinstance(parsed.choices[0].message.parsed, Guest)

own = settings | {"input": "Who was at the door?", "max_output_tokens": 20}
response = client.responses.create(**own)
events = list(client.responses.create(**own, stream=True))
assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == response.output_text
assert isinstance(client.responses.parse(**settings, input="Who?", text_format=Guest).output_parsed, Guest)

try:
    client.with_options(api_key="wrong").models.list()
except openai.AuthenticationError as error:
    assert error.status_code == 401
else:
    raise AssertionError("a wrong key was taken")
