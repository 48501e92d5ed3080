"""The command line: `hf-paged run` generates for a file of prompts, with hf_paged and without, and compares the two."""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.text import Text
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    AutoTokenizer,
)
from transformers.utils import logging as transformers_logging

from hf_paged.api.patching import patch, unpatch
from hf_paged.tools.comparison import Work, eos_token_ids, make_batches, prompt_room, read_prompts
from hf_paged.tools.families import families, families_table, family_names
from hf_paged.tools.report import comparison_table

TINY_MODEL = Path(__file__).parents[1] / "assets" / "tiny_lm"
TINY_PROMPTS = Path(__file__).parents[1] / "assets" / "prompts.jsonl"
DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
console = Console(highlight=False)
error_console = Console(stderr=True, highlight=False)


def main() -> None:
    """The entry point of `hf-paged` and `python -m hf_paged`."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            own = version("hf-paged")
        except PackageNotFoundError:  # used from a checkout
            own = "(not installed)"
        console.print(f"hf_paged {own}, transformers {version('transformers')}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
) -> None:
    """A paged KV cache behind Hugging Face generate()."""


@app.command()
def run(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME_OR_PATH",
            help="A causal language model, by name or folder; default: the embedded one.",
            show_default=False,
        ),
    ] = str(TINY_MODEL),
    prompts: Annotated[
        Path,
        typer.Option(
            help="Text, a prompt a line, or .jsonl with prompt, question, turns or text; default: the embedded ones.",
            show_default=False,
        ),
    ] = TINY_PROMPTS,
    limit: Annotated[int, typer.Option(min=1, help="Take N of the prompts.")] = 16,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Take the first N as they come; otherwise N at random (--seed).")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt, at most.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts in one generate() call.")] = 8,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in one KV block; default: 16.")] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks in the pool; default: from free memory.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="One of auto (the checkpoint's), float32, bfloat16, float16.")] = "float32",
    device: Annotated[str, typer.Option(help="Such as cpu or cuda:0; default: cuda where there is one.")] = "",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; default: one for the embedded model, else torch's choice.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of the prompts and of --sample.")] = 0,
    sample: Annotated[bool, typer.Option("--sample/--greedy", help="Sample, or take the likeliest token.")] = False,
    show: Annotated[int, typer.Option(min=0, help="How many of the generated texts to print.")] = 3,
    stream: Annotated[bool, typer.Option("--stream", help="Print each batch's first text while it is made.")] = False,
) -> None:
    """Generate for a file of prompts with hf_paged and with stock generate(); compare tokens, time and KV memory.

    Both get the same left-padded batches and the same seed, one after the other in this process, each after one short
    generate() to warm up. Without options: the tiny model and the prompts that come with the package.
    """
    transformers_logging.disable_progress_bar()  # of loading weights
    transformers_logging.set_verbosity_error()
    try:
        texts = read_prompts(prompts)
        num_texts = len(texts)
        texts = texts[:limit] if in_order else random.Random(seed).sample(texts, min(limit, num_texts))
        place = _device(device)
        tokenizer, stock_model = _load(model, dtype, place)
        dtype = str(stock_model.dtype).removeprefix("torch.")
        batches, num_cut = make_batches(tokenizer, texts, batch_size, prompt_room(stock_model, max_new_tokens), place)
    except ValueError as error:
        _fail(error)
    if threads or model == str(TINY_MODEL):
        torch.set_num_threads(threads or 1)  # the tiny model's threads would only wait for each other
    prompt_ids = [ids for batch in batches for ids in batch.prompt_ids]
    lengths = [len(ids) for ids in prompt_ids]
    name = "the embedded tiny model" if model == str(TINY_MODEL) else model
    num_threads = torch.get_num_threads()
    where = f"cpu ({num_threads} thread{'s' if num_threads > 1 else ''})" if place.type == "cpu" else str(place)
    console.print(
        f"{name}, {dtype} on {where}: {len(texts)} of {num_texts} prompts {'' if in_order else 'in random order '}with "
        f"{min(lengths)} to {max(lengths)} tokens, up to {max_new_tokens} new ones each, "
        f"{'sampled' if sample else 'greedy'}, {batch_size} to a generate() call",
        markup=False,
    )
    if num_cut:
        cut = f"{num_cut} prompts are" if num_cut > 1 else "1 prompt is"
        console.print(
            f"{cut} cut to the last {max(lengths)} tokens: the model's positions less --max-new-tokens", style="yellow"
        )

    work = Work(tokenizer, batches, max_new_tokens, sample, seed, eos_token_ids(stock_model))
    paged_model = copy.deepcopy(stock_model)
    try:
        given: dict[str, Any] = {"block_size": block_size, "num_blocks": num_blocks}
        patch(paged_model, **{name: value for name, value in given.items() if value is not None})
        paged = work.run_paged(paged_model, stream)
        unpatch(paged_model)
    except ValueError as error:  # the settings, the model (UnsupportedModelError), or a prompt larger than the pool
        _fail(error)
    stock = work.run_stock(stock_model)

    for before, new in list(zip(prompt_ids, paged.token_ids, strict=True))[: 0 if stream else show]:
        console.print()
        console.print(_styled(tokenizer, before, new))
    console.print()
    rounding = None if dtype == "float32" else f"{dtype} may round a near-tie either way: see hf_paged.testing"
    console.print(comparison_table(stock, paged, caption=rounding))


@app.command()
def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="[NAME_OR_PATH]",
            help="A causal language model, or one with an encoder (T5, Whisper), by name or folder; default: the "
            "embedded one.",
            show_default=False,
        ),
    ] = str(TINY_MODEL),
    host: Annotated[str, typer.Option(help="Address to listen on; only this machine can reach the default.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that requests must bring; may be given again.", envvar="HF_PAGED_API_KEY"),
    ] = None,
    served_name: Annotated[
        str | None, typer.Option(help="What requests call the model; default: its name, or its folder's.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH, a LoRA adapter that is a model of that name; may be given again."),
    ] = None,
    adapter_dir: Annotated[
        Path | None,
        typer.Option(help="A folder from which clients may load more of them; needs a key.", exists=True),
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in one KV block; default: 16.")] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks in the pool; default: from free memory.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences in a step; default: 256.")] = None,
    max_step_seconds: Annotated[
        float, typer.Option(min=0.001, envvar="HF_PAGED_MAX_STEP_SECONDS", help="Seconds that a step should take.")
    ] = 1.0,
    max_branches: Annotated[int | None, typer.Option(min=1, help="Samples or beams that a prompt may have.")] = None,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; beyond them: 429.")] = 1024,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="The longest prompt.")] = None,
    max_body_mib: Annotated[float, typer.Option(min=0.001, help="The largest body of a request.")] = 4.0,
    max_audio_mib: Annotated[float, typer.Option(min=0.001, help="The largest body with a sound in it.")] = 25.0,
    max_audio_seconds: Annotated[float, typer.Option(min=0.1, help="The longest sound.")] = 900.0,
    max_answer_mib: Annotated[
        float, typer.Option(min=0.01, help="The largest answer, as estimated from a request's fields.")
    ] = 64.0,
    max_pictures: Annotated[int, typer.Option(min=1, help="Pictures that a request may have.")] = 10,
    max_megapixels: Annotated[
        float, typer.Option(min=0.27, help="Millions of pixels that a request's pictures may have together.")
    ] = 33.5,
    max_megapixels_at_work: Annotated[
        float, typer.Option(min=0.27, help="Of all requests before their first token; beyond them: 429.")
    ] = 134.0,
    request_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may take.")] = 600.0,
    allow_priority: Annotated[
        bool, typer.Option("--allow-priority", help="Take `priority` of requests, which overtake others by it.")
    ] = False,
    drain_seconds: Annotated[int, typer.Option(min=0, help="Seconds that running requests have at the end.")] = 30,
    chat_template: Annotated[
        Path | None, typer.Option(help="A file with a Jinja template, for the tokenizer's own.", exists=True)
    ] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="An origin whose pages may call.")] = None,
    public_docs: Annotated[
        bool, typer.Option("--public-docs", help="Show /docs and /openapi.json without a key; with keys they are off.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="One of auto (the checkpoint's), float32, bfloat16, float16.")] = "auto",
    device: Annotated[str, typer.Option(help="Such as cpu or cuda:0; default: cuda where there is one.")] = "",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; default: one for the embedded model, else torch's choice.")
    ] = None,
) -> None:
    """Serve a model over OpenAI's HTTP interface, until Ctrl-C. Needs the extra [server]."""
    transformers_logging.disable_progress_bar()
    is_embedded = model == str(TINY_MODEL)
    if threads or is_embedded:
        torch.set_num_threads(threads or 1)
    given: dict[str, Any] = {"block_size": block_size, "num_blocks": num_blocks, "max_step_seconds": max_step_seconds}
    given |= {"max_num_seqs": max_num_seqs, "max_branches": max_branches}
    try:
        from hf_paged.server.run import run_server  # with its extra
        from hf_paged.server.settings import ServerSettings, name_of

        adapters = _adapters(adapter or [])
        settings = ServerSettings(
            adapters=tuple(adapters),
            adapter_dir=adapter_dir,
            model_name=served_name or name_of(model),
            api_keys=tuple(api_key or ()),
            max_body_bytes=int(max_body_mib * (1 << 20)),
            max_prompt_tokens=max_prompt_tokens,
            max_waiting=max_waiting,
            max_answer_bytes=int(max_answer_mib * (1 << 20)),
            max_pictures=max_pictures,
            max_pixels=int(max_megapixels * 1e6),
            max_audio_bytes=int(max_audio_mib * (1 << 20)),
            max_audio_seconds=max_audio_seconds,
            max_pixels_at_work=int(max_megapixels_at_work * 1e6),
            request_timeout=request_timeout,
            allow_priority=allow_priority,
            chat_template=None if chat_template is None else chat_template.read_text(encoding="utf-8"),
            public_docs=public_docs,
            cors_origins=tuple(cors_origin or ()),
        )
        source = _source(model)
        kind = _kind(source)
        tokenizer, loaded = _load(source, dtype, _device(device), kind)
        has_processor = kind in (AutoModelForImageTextToText, AutoModelForSpeechSeq2Seq)
        processor = AutoProcessor.from_pretrained(source) if has_processor else None
        patch(loaded, **{name: value for name, value in given.items() if value is not None})
        for name, path in adapters.items():
            loaded.paged.load_adapter(name, path)
        loaded.paged.core.pool.is_serving = True
        run_server(loaded, tokenizer, settings, host, port, drain_seconds, processor)
    except (ValueError, OSError, ImportError) as error:
        _fail(error)


# The demo has its own options, and its own help, in a module that is imported only here.
@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def demo(context: typer.Context) -> None:
    """Watch the paged cache work, in a browser: hf-paged demo [MODEL]. Needs the extra [demo]."""
    package = "hf_paged.demo" if find_spec("hf_paged.demo") else "demo"  # of the wheel, or of the checkout
    command = importlib.import_module(f"{package}.__main__").command
    command(context.args, prog_name=context.command_path)


@app.command("models")
def list_models(
    names: Annotated[
        list[str] | None, typer.Argument(help="Families (model types) of any kind; default: all these.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
) -> None:
    """Try every family of causal language models that transformers knows: taken how, at what cost, refused why.

    Each is a tiny random model of the family's default config; nothing is downloaded. The bytes are those of the
    default config's keys and values in bfloat16.
    """
    try:
        known = names or sorted(family_names())
        found = list(tqdm(families(known), total=len(known), unit="family", leave=False, disable=None))
    except ValueError as error:
        _fail(error)
    table = families_table(found, as_markdown=markdown)
    (Console(width=10_000, highlight=False) if markdown else console).print(table)
    num_taken = sum(family.report.supported for family in found)
    console.print(f"{num_taken} of {len(found)} are taken, with transformers {version('transformers')}")


def _adapters(given: Sequence[str]) -> dict[str, str]:
    """Paths by name."""
    found: dict[str, str] = {}
    for each in given:
        name, _, path = each.partition("=")
        if not name or not path or name in found:
            raise ValueError(f"--adapter is NAME=PATH, each name once, got {each!r}")
        found[name] = path
    return found


def _kind(name: str) -> Any:
    """The class that loads a model: one that sees, one that hears, one with an encoder, or none of these."""
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError):  # which `_load` says
        return AutoModelForCausalLM
    kinds: tuple[Any, ...] = (AutoModelForImageTextToText,)
    if config.is_encoder_decoder:  # Bart's and others' configs are also those of their decoders
        kinds = AutoModelForSpeechSeq2Seq, AutoModelForSeq2SeqLM, *kinds
    return next((kind for kind in kinds if type(config) in kind._model_mapping), AutoModelForCausalLM)


def _source(name: str) -> str:
    """The folder of a model, or its name."""
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"the folder {name} holds no model: it has no config.json")
    if not folder.is_dir() and name.startswith((".", "/", "~")):
        raise ValueError(f"there is no folder {name}")
    return str(folder) if folder.is_dir() else name


def _load(name: str, dtype: str, device: torch.device, kind: Any = AutoModelForCausalLM) -> tuple[Any, Any]:
    """Tokenizer (set up for batches) and model."""
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    source = _source(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", truncation_side="left")
        model = kind.from_pretrained(source, dtype=DTYPES[dtype]).to(device).eval()
    except (OSError, ValueError, ImportError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(f"cannot load the model {name!r}: {reason}") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer, model


def _device(name: str) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"cannot use --device {name!r}: {str(error).splitlines()[0]}") from None


def _styled(tokenizer: Any, prompt_ids: list[int], new_ids: list[int], limit: int = 300) -> Text:
    """A prompt (its end, when long) in dim and what follows it in bold."""
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    whole = tokenizer.decode(prompt_ids + new_ids, skip_special_tokens=True)  # decoded apart, a space may get lost
    return Text.assemble(
        (prompt if len(prompt) <= limit else "… " + prompt[-limit:], "dim"), (whole[len(prompt) :], "bold")
    )


def _fail(error: Exception) -> NoReturn:
    """Ends the command with one sentence in place of a traceback."""
    error_console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(code=2)
