"""smolagents: a model plain and streamed, an agent whose steps are forced calls, and one that writes code to a schema.

Its schemas do not limit strings, so the limit of tokens may cut what the small model says in them.
"""

import os

from smolagents import ActionStep, ChatMessage, CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES
from smolagents.utils import AgentGenerationError

server = {"model_id": os.environ["MODEL"], "api_base": os.environ["BASE_URL"], "temperature": 0}
messages = [ChatMessage(role="user", content=[{"type": "text", "text": "Who was at the door?"}])]


@tool
def open_door(number: int) -> str:
    """Opens a door.

    Args:
        number: The number of the door.
    """
    return "Nobody is there."


model = OpenAIModel(**server, max_tokens=20)
answer = model.generate(messages)
assert answer.token_usage.output_tokens == 20
assert "".join(delta.content or "" for delta in model.generate_stream(messages)) == answer.content

calls = []
for is_streamed in (False, True):
    own = {"model": OpenAIModel(**server, max_tokens=60), "stream_outputs": is_streamed, "max_steps": 2}
    agent = ToolCallingAgent([open_door], prompt_templates=EMPTY_PROMPT_TEMPLATES, **own)
    assert agent.run("Open a door.")
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    assert steps[0].tool_calls and not any(isinstance(step.error, AgentGenerationError) for step in steps)
    calls.append([(call.name, call.arguments) for call in steps[0].tool_calls])
assert calls[0] == calls[1] and {name for name, _ in calls[0]} <= {"open_door", "final_answer"}

own = {"model": OpenAIModel(**server, max_tokens=60), "use_structured_outputs_internally": True, "max_steps": 2}
coder = CodeAgent([open_door], prompt_templates=EMPTY_PROMPT_TEMPLATES, **own)
assert coder.run("Open a door.")
steps = [step for step in coder.memory.steps if isinstance(step, ActionStep) and step.model_output]
assert len(steps) == 2 and all(step.model_output.startswith('{"thought": "') for step in steps)
