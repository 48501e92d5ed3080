"""llm, the command line: chats, completions and responses, plain and streamed; a conversation, a schema, a tool."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

KINDS = {"chat": {}, "completion": {"completion": True}, "responses": {"responses": True}}
home = Path("llm").absolute()
home.mkdir()
models = [
    {
        "model_id": name,
        "model_name": os.environ["MODEL"],
        "api_base": os.environ["BASE_URL"],
        "api_key_name": "openai",
        "supports_schema": True,
        "supports_tools": True,
        **kind,
    }
    for name, kind in KINDS.items()
]
(home / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML


def llm(*arguments: Any) -> str:
    command = ["llm", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LLM_USER_PATH": str(home)})
    assert result.returncode == 0, result.stderr
    return result.stdout


for name in KINDS:
    arguments = ("-m", name, "-o", "max_tokens", 20, "-o", "temperature", 0, "Who was at the door?")
    answer = llm(*arguments, "--no-stream")
    assert answer.strip() and answer == llm(*arguments)
assert llm("-m", "chat", "--continue", "-s", "You tell stories.", "-o", "max_tokens", 5, "And then?").strip()
logged = json.loads(llm("logs", "--json", "-n", 1))[0]
assert logged["output_tokens"] == 5 and logged["input_tokens"] > 5

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
SCHEMA["additionalProperties"] = False
for name in ("chat", "responses"):
    assert json.loads(llm("-m", name, "--schema", json.dumps(SCHEMA), "Who was at the door?"))["age"] <= 99
# No model option forces a call, so this shows only that the server takes the tool.
assert llm("-m", "chat", "-T", "llm_time", "-o", "max_tokens", 5, "What time is it?").strip()
