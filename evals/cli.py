"""The command `kvcache eval`: measure policies by perplexity, needles, memory; compare them; plan; report.

Each subcommand is a module with `EXAMPLES`, `add_parser(commands)`, and heavy imports in its functions only.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODULES = {
    "ppl": "perplexity",
    "needle": "needle",
    "memory": "memory",
    "compare": "compare",
    "survey": "survey",
    "drift": "drift",
    "plan": "plan",
    "report": "report",
}
DTYPES = ("float32", "bfloat16", "float16", "float64")
EXAMPLES = """\
examples:
  kvcache eval ppl --cache full --cache streaming_llm:sinks=4,window=508     perplexity, side by side
  kvcache eval needle --cache sink_h2o:slots=25%                             what is still found
  kvcache eval memory --cache full --cache sink_h2o                          bytes and time against length
"""


def main(argv: Sequence[str]) -> int:
    """`kvcache eval`; returns the exit code."""
    options = _parser(argv).parse_args(list(argv))
    from kvcache.evals import cells  # after --help

    try:
        return options.run(options) or 0
    except cells.OtherProcess:
        return 0


class Parser(argparse.ArgumentParser):
    """One line instead of argparse's usage text before the error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (try {self.prog} --help)\n")


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = Parser(
        prog="kvcache eval",
        description=(__doc__ or "").splitlines()[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="|".join(MODULES))
    chosen = [name for name in MODULES if name in argv[:1]]
    for name in chosen or MODULES:  # the others' imports take time
        import_module(f"kvcache.evals.{MODULES[name]}").add_parser(commands)
    return parser


# ---- what the subcommands share


def add_command(commands: Any, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    """A subcommand's parser. examples: a block of lines that begins with "examples:"."""
    return commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def common_options(parser: argparse.ArgumentParser) -> None:
    """--model, --device, --dtype, --threads, --seed, --json, --png."""
    group = parser.add_argument_group("common options")
    group.add_argument(
        "--model", default="smollm2", help="smollm2 (default), a folder, a .gguf file or a hub id such as owner/name"
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1, mps, ... (default: cuda where there is one, else cpu)")
    group.add_argument("--device-map", metavar="MAP", help="auto, balanced or sequential: over all GPUs of the machine")
    group.add_argument("--dtype", choices=DTYPES, help="of weights and cache (default: float32 on cpu, else bfloat16)")
    group.add_argument("--threads", metavar="N", type=positive, help="threads that torch may use (default: torch's)")
    group.add_argument("--seed", metavar="N", type=int, default=0, help="of everything random (default: 0)")
    group.add_argument("--json", metavar="F", type=Path, help="keep results in this file, and take up what it holds")
    group.add_argument("--png", metavar="F", type=Path, help="draw them there")


def load_model(options: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer that the common options ask for, with torch's threads and seed set.

    Raises:
        ValueError: no such model or device.
    """
    import torch
    from rich.console import Console
    from transformers.utils import logging

    from kvcache.evals import scale
    from kvcache.models.load import load

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    device = scale.local_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, options.dtype or ("float32" if device == "cpu" else "bfloat16"))
    with Console(stderr=True).status(f"loading {options.model}"):
        if options.device_map is None:
            return load(options.model, dtype=dtype, device=device)
        model, tokenizer = load(options.model, dtype=dtype)
        return scale.spread(model, options.device_map), tokenizer


def positive(text: str) -> int:
    """argparse's type of a whole number from 1 on."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """argparse's type of a whole number from 0 on."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
    return number


def console() -> Any:
    """Where tables go: standard output, as wide as the terminal, or wide enough for a file."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    return Console(width=width)
