"""`hf-paged`: what it refuses, and one run from end to end on the embedded model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import WhisperProcessor
from typer.testing import CliRunner

from helpers import speech
from helpers.models import tiny_lm, tiny_tokenizer
from helpers.sources import tiny_bart
from hf_paged.server import create_app
from hf_paged.tools.cli import app, read_prompts

ROOT = Path(__file__).parents[2]


def invoke(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200", "TERM": "dumb"})


def table(output):
    """The comparison table as {label: [cells]}."""
    rows = (re.split(r"\s{2,}", line.strip()) for line in output.splitlines())
    return {label: cells for label, *cells in rows}


def refused(*args):
    """The message of a run that ends with exit code 2 and no traceback."""
    result = invoke("run", *args)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result.output


@pytest.fixture
def prompt_file(tmp_path):
    def write(content, name="prompts.txt"):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        return path

    return write


# ------------------------------------------------------------------------------------------------------- end to end


def test_run_compares_with_stock():
    result = invoke("run", "--limit", 4, "--max-new-tokens", 8, "--show", 2)
    assert result.exit_code == 0, result.output
    rows = table(result.output)
    assert rows["tokens identical"] == ["yes"]
    assert rows["tokens generated"][0] == rows["tokens generated"][1]
    assert float(rows["of it wasted"][1].rstrip("%")) < float(rows["of it wasted"][0].rstrip("%"))
    used, total = (int(number.replace(",", "")) for number in rows["blocks used / total"][1].split(" / "))
    assert 0 < used < total


def test_module_entry_point_with_sampling_and_a_small_pool(prompt_file):
    path = prompt_file("It was late in the evening when\n\nThe old man\nOne\n")
    options = "--sample --seed 3 --max-new-tokens 8 --batch-size 2 --block-size 4 --num-blocks 24 --show 0"
    result = subprocess.run(
        [sys.executable, "-m", "hf_paged", "run", "--prompts", str(path), *options.split()],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = table(result.stdout)
    assert rows["tokens identical"] == ["yes"]
    assert rows["blocks used / total"][1].endswith(" / 24")


def test_stream_prints_the_first_text_of_the_batch(prompt_file):
    path = prompt_file("It was late in the evening when\nThe old man\n")
    result = invoke("run", "--prompts", path, "--in-order", "--stream", "--max-new-tokens", 8)
    assert result.exit_code == 0, result.output
    assert "It was late in the evening when" in result.output
    assert table(result.output)["tokens identical"] == ["yes"]


def test_a_prompt_that_is_too_long_is_cut_and_said_to_be(prompt_file):
    path = prompt_file("One morning\n" + "the door " * 3000)
    result = invoke("run", "--prompts", path, "--max-new-tokens", 2, "--show", 0)
    assert result.exit_code == 0, result.output
    assert "1 prompt is cut to the last 2046 tokens" in result.output


def test_version():
    result = invoke("--version")
    assert result.exit_code == 0
    assert re.match(r"hf_paged \S+, transformers 5\.\S+, torch 2\.\S+\n", result.output)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompts", "no/such/file.txt"], "cannot read no/such/file.txt: No such file"),
        (["--model", "./no/such/folder"], "there is no folder ./no/such/folder"),
        (["--dtype", "int8"], "--dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        (["--device", "toaster"], "cannot use --device 'toaster'"),
        (["--max-new-tokens", 2048], "--max-new-tokens 2048 leaves no room for a prompt"),
        (["--limit", 1, "--num-blocks", 1, "--max-new-tokens", 100], "the pool has 1"),
        (["--limit", 0], "--limit"),
        (["--max-new-tokens", "many"], "--max-new-tokens"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(args, message):
    assert message in refused(*args)


def test_the_blocks_that_it_says_it_needs_are_enough():
    """Would break: advice that a short first call gives, and not the work itself."""
    options = ["--limit", 2, "--block-size", 4, "--max-new-tokens", 12, "--show", 0]
    needed = int(re.search(r"up to 12 new ones needs (\d+) KV blocks", refused(*options, "--num-blocks", 2))[1])
    assert f"--num-blocks {needed} or more" in refused(*options, "--num-blocks", needed - 1)
    result = invoke("run", *options, "--num-blocks", needed)
    assert result.exit_code == 0 and table(result.output)["tokens identical"] == ["yes"], result.output


def test_a_folder_without_a_model_is_refused(tmp_path):
    assert "holds no model: it has no config.json" in refused("--model", tmp_path)


def test_an_unsupported_model_is_refused_with_its_reasons(tmp_path, prompt_file):
    from transformers import AutoTokenizer, RwkvConfig, RwkvForCausalLM

    from hf_paged.tools.cli import TINY_MODEL

    config = RwkvConfig(vocab_size=2048, hidden_size=16, num_hidden_layers=2)
    RwkvForCausalLM(config).save_pretrained(tmp_path / "rwkv")
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(tmp_path / "rwkv")
    message = refused("--model", tmp_path / "rwkv", "--limit", 1, "--max-new-tokens", 2)
    assert "error: hf_paged does not support RwkvForCausalLM" in message


# ----------------------------------------------------------------------------------------------------------- prompts


def test_text_file_has_a_prompt_a_line(prompt_file):
    assert read_prompts(prompt_file("\ufeffone\n\n  two\u2028\n")) == ["one", "  two\u2028"]


def test_every_known_key_of_a_jsonl_file_is_found(prompt_file):
    records = [{"id": 1, "prompt": "a"}, {"question": "b"}, {"turns": ["c", "later"]}, {"text": "d"}]
    assert read_prompts(prompt_file("\n".join(map(json.dumps, records)), "p.jsonl")) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no prompts in it"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2: not JSON"),
        ('["a"]', "line 1: expected an object"),
        ('\n{"input": "a", "id": 3}', "line 2: none of the keys prompt, question, turns, text; it has input, id"),
        ('{"prompt": 7}', "line 1: 'prompt' holds no text, but 7"),
        ('{"turns": []}', r"line 1: 'turns' holds no text, but \[\]"),
        ('{"text": "  "}', "line 1: 'text' holds no text"),
    ],
)
def test_bad_jsonl_is_refused_with_its_line(prompt_file, content, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(prompt_file(content, "p.jsonl"))


def test_a_binary_file_is_refused(tmp_path):
    path = tmp_path / "weights.txt"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ValueError, match="not a UTF-8 text file"):
        read_prompts(path)


NEEDED = {
    "examples/pictures.py": "pillow",
    "examples/many_adapters.py": "peft",
    "examples/web_endpoint.py": "hf-paged[server]",
    "examples/openai_client.py": "hf-paged[server]",
    "examples/ray_data.py": "hf-paged[ray]",
    "examples/ray_serve.py": "hf-paged[ray]",
    "benchmarks/serve.py": "hf-paged[server]",
    "benchmarks/paper/plots.py": "hf-paged[bench]",
    "hf_paged.server": "hf-paged[server]",
    "hf_paged serve": "hf-paged[server]",
    "hf_paged.tools.lm_eval_model": "lm_eval[hf]",
    "demo": "hf-paged[demo]",
    "hf_paged demo": "hf-paged[demo]",
}
WITHOUT_EXTRAS = """
import runpy, sys

for package in "PIL fastapi gradio lm_eval matplotlib openai pandas peft ray starlette uvicorn".split():
    sys.modules[package] = None
sys.path += [".", "benchmarks"]
for what in sys.argv[1:]:
    run = runpy.run_path if what.endswith(".py") else runpy.run_module
    name, *sys.argv[1:] = what.split()
    print("=", what, file=sys.stderr)
    try:
        run(name, run_name="__main__")
    except (ModuleNotFoundError, SystemExit) as error:
        print(error, file=sys.stderr)
"""


def test_what_is_not_installed_is_named():
    """Would break: an example or a command that ends with the name of a module, and not with what to install."""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, *NEEDED], capture_output=True, text=True, check=False, cwd=ROOT
    )
    said = dict(re.findall(r'^= (.*)\n.*: pip install "(.*)"$', result.stderr, re.MULTILINE))
    assert said == NEEDED, result.stderr


# ------------------------------------------------------------------------------------------------------------- serve


@pytest.mark.parametrize(
    ("options", "dtype", "name"),
    [
        ([], "bfloat16", "my-model"),
        (["--dtype", "float32", "--served-name", "other", "--public-docs"], "float32", "other"),
    ],
)
def test_serve_takes_dtype_and_name_from_the_folder(tmp_path, monkeypatch, options, dtype, name):
    """Would break: weights twice as large as on the disk, a path that clients have to call the model by."""
    tokenizer, model = tiny_tokenizer(), tiny_lm().bfloat16()
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "my-model")
    served = []
    monkeypatch.setattr("hf_paged.server.run.run_server", lambda *given: served.append(given))
    result = invoke("serve", f"{tmp_path}/my-model/", "--num-blocks", 64, *options)
    assert result.exit_code == 0, result.output
    loaded, _, settings = served[0][:3]
    assert (str(loaded.dtype), settings.model_name) == (f"torch.{dtype}", name)
    assert loaded.paged.core.pool.is_serving, "a GPU's pool is sized as for a model in another's process"
    assert settings.public_docs == bool(options)
    assert create_app(loaded, tokenizer).state.serving.model_name == "my-model"  # without the command line


@pytest.mark.parametrize("kind", ["hears", "reads"])
def test_serve_loads_models_with_an_encoder_whole(tmp_path, monkeypatch, kind):
    """Would break: the decoder alone, which has such a config, too; a model that hears without its processor."""
    model = speech.tiny_whisper() if kind == "hears" else tiny_bart(2048)
    parts = [model, WhisperProcessor(speech.feature_extractor(), speech.tokenizer())]
    for part in parts if kind == "hears" else (model, tiny_tokenizer()):
        part.save_pretrained(tmp_path / "model")
    served = []
    monkeypatch.setattr("hf_paged.server.run.run_server", lambda *given: served.append(given))
    monkeypatch.setenv("HOME", str(tmp_path))
    result = invoke("serve", "~/model", "--num-blocks", 64, "--max-audio-seconds", 60)
    assert result.exit_code == 0, result.output
    loaded, tokenizer, settings = served[0][:3]
    processor = served[0][-1]
    assert loaded.config.is_encoder_decoder and settings.max_audio_seconds == 60
    paths = set(create_app(loaded, tokenizer, settings, processor=processor).openapi()["paths"])
    assert ("/v1/audio/transcriptions" in paths) == (kind == "hears") == (processor is not None)
