"""LangChain: a chat model plain, streamed, in a batch, with a tool and with a schema; a completion; responses."""

import os
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

settings = {"base_url": os.environ["BASE_URL"], "model": os.environ["MODEL"], "temperature": 0, "max_retries": 0}


class Guest(BaseModel):
    """Who came."""

    name: Literal["Ann", "Bob"]
    age: int = Field(ge=1, le=99)


@tool
def open_door(number: Literal[1, 2, 3]) -> str:
    """Opens a door."""
    return f"Nobody is behind door {number}."


chat = ChatOpenAI(**settings, max_tokens=20)
answer = chat.invoke("Who was at the door?")
assert answer.usage_metadata["output_tokens"] == 20
assert "".join(chunk.text for chunk in chat.stream("Who was at the door?")) == answer.text
assert [each.text for each in chat.batch(["Who was at the door?"] * 4)] == [answer.text] * 4

with_tool = ChatOpenAI(**settings).bind_tools([open_door], tool_choice="required", parallel_tool_calls=False)
question = HumanMessage("Open a door.")
asked = with_tool.invoke([question])
(call,) = asked.tool_calls
result = open_door.invoke(call)
assert isinstance(result, ToolMessage) and result.text.startswith("Nobody")
assert chat.invoke([question, asked, result]).text
pieces = list(with_tool.stream([question]))
assert sum(pieces[1:], pieces[0]).tool_calls[0]["args"] == call["args"]

for method in ("json_schema", "function_calling"):
    assert isinstance(ChatOpenAI(**settings).with_structured_output(Guest, method=method).invoke("Who?"), Guest)
as_dict = ChatOpenAI(**settings).with_structured_output(Guest.model_json_schema(), method="json_schema", strict=True)
assert Guest.model_validate(as_dict.invoke("Who?"))

completion = OpenAI(**settings, max_tokens=8)
assert completion.invoke("The door") == "".join(completion.stream("The door"))

responses = ChatOpenAI(**settings, max_tokens=20, use_responses_api=True)
text = responses.invoke("Who was at the door?").text
assert text == "".join(chunk.text for chunk in responses.stream("Who was at the door?"))
