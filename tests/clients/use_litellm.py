"""litellm: chats plain, streamed, at once, with a tool and with a schema; a text completion; the Responses API."""

import asyncio
import json
import os
from typing import Literal

import litellm
from pydantic import BaseModel, Field

litellm.suppress_debug_info = True
settings = {"api_base": os.environ["BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"], "temperature": 0}
messages = [{"role": "user", "content": "Who was at the door?"}]


class Guest(BaseModel):
    name: Literal["Ann", "Bob"]
    age: int = Field(ge=1, le=99)


tool = {"type": "function", "function": {"name": "open_door", "parameters": Guest.model_json_schema()}}
for provider in ("openai", "hosted_vllm"):
    settings["model"] = f"{provider}/{os.environ['MODEL']}"
    answer = litellm.completion(**settings, messages=messages, max_tokens=20)
    chunks = list(litellm.completion(**settings, messages=messages, max_tokens=20, stream=True))
    assert answer.usage.completion_tokens == 20 and answer.choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
    assert litellm.stream_chunk_builder(chunks).choices[0].finish_reason == "length"

    called = litellm.completion(
        **settings, messages=messages, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "open_door" and Guest.model_validate_json(call.function.arguments)
    turns = [*messages, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Nobody."}]
    assert litellm.completion(**settings, messages=turns, max_tokens=5).choices[0].message.content

    structured = litellm.completion(**settings, messages=messages, response_format=Guest)
    assert Guest.model_validate(json.loads(structured.choices[0].message.content))


async def several() -> None:
    calls = [litellm.acompletion(**settings, messages=messages, max_tokens=20) for _ in range(4)]
    assert {each.choices[0].message.content for each in await asyncio.gather(*calls)} == (
        {answer.choices[0].message.content}
    )


asyncio.run(several())
completion = litellm.text_completion(**settings, prompt="The door", max_tokens=8)
assert completion.usage.completion_tokens == 8 and completion.choices[0].text
settings["model"] = f"openai/{os.environ['MODEL']}"
response = litellm.responses(**settings, input="Who was at the door?", max_output_tokens=20)
assert response.output[0].content[0].text
