"""instructor: an object, a partial one while it comes, and a list of them, by tools, by schemas and by responses."""

import os
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Guest(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else the small model adds properties without end
    name: Literal["Ann", "Bob"]
    age: int = Field(ge=1, le=99)


client = openai.OpenAI(base_url=os.environ["BASE_URL"], max_retries=0)
question = {"messages": [{"role": "user", "content": "Who was at the door?"}], "temperature": 0, "max_retries": 0}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):
    asking = instructor.from_openai(client, mode=mode, model=os.environ["MODEL"])
    guest, reply = asking.create_with_completion(response_model=Guest, **question)
    assert isinstance(guest, Guest) and reply.usage.total_tokens > 0
    *_, last = asking.create_partial(response_model=Guest, **question)
    assert (last.name, last.age) == (guest.name, guest.age)
    guests = asking.create_iterable(response_model=Guest, **question) if mode is instructor.Mode.TOOLS else ()
    assert all(isinstance(each, Guest) for each in guests)
