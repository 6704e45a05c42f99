"""Long decoding: does text that was sampled from a small cache stay as likely as text sampled from the full one?

Each cache continues the same prompt with the same seeds. The full model then reads prompt and continuation in one
forward: the mean surprise of every stretch says whether, and where, the text falls apart.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.evals.cli import add_command, common_options, console, load_model, positive

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor
    from transformers import PreTrainedModel

KIND = "drift"
SUMMARY = "Sample long texts from each cache and score them under the full model, stretch by stretch."
EXAMPLES = """\
examples:
  kvcache eval drift --cache sink_h2o:slots=128 --json drift.json --png drift.png
  kvcache eval drift --cache snapkv:slots=128,window=64 --new-tokens 1200 --stretch 200 --repeats 4
"""


@dataclass(frozen=True)
class Sampling:
    """How texts are sampled. prompt, tokens, stretch: in tokens."""

    prompt: int = 512
    tokens: int = 600
    stretch: int = 150
    temperature: float = 0.8
    repetition_penalty: float = 1.1


def measure(model: PreTrainedModel, prompt: Tensor, cache: str, sampling: Sampling, seed: int) -> dict[str, Any]:
    """Sample from the prompt `[1, n]` with that cache; nats per token of each stretch under the full model."""
    import torch

    from kvcache.evals.caches import build_cache, parse_cache
    from kvcache.evals.generation import CACHE_ARGUMENT

    torch.manual_seed(seed)
    options: dict[str, Any] = {
        CACHE_ARGUMENT: build_cache(parse_cache(cache), model.config, prompt.shape[1]),
        "attention_mask": torch.ones_like(prompt),
        "min_new_tokens": sampling.tokens,
        "max_new_tokens": sampling.tokens,
        "do_sample": True,
        "temperature": sampling.temperature,
        "repetition_penalty": sampling.repetition_penalty,
        "pad_token_id": 0,
    }
    with torch.inference_mode():
        generate: Any = model.generate
        ids = generate(prompt, **options)
        logits = model(ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1].float()
    nats = torch.nn.functional.cross_entropy(logits[0], ids[0, prompt.shape[1] :], reduction="none").tolist()
    parts = [nats[start : start + sampling.stretch] for start in range(0, len(nats), sampling.stretch)]
    return {"cache": cache, "seed": seed, "nats": [round(statistics.fmean(part), 4) for part in parts]}


@dataclass(frozen=True)
class Line:
    """One cache: mean nats per token of each stretch, over n texts, and the standard error of each mean."""

    cache: str
    n: int
    nats: tuple[float, ...]
    error: tuple[float, ...]


def lines(content: Mapping[str, Any]) -> list[Line]:
    """In the order of the cells."""
    groups: dict[str, list[Sequence[float]]] = {}
    for cell in content["cells"].values():
        groups.setdefault(cell["cache"], []).append(cell["nats"])
    found = []
    for cache, texts in groups.items():
        columns = list(zip(*texts, strict=True))
        errors = [statistics.stdev(column) / len(column) ** 0.5 if len(column) > 1 else 0.0 for column in columns]
        found.append(Line(cache, len(texts), tuple(map(statistics.fmean, columns)), tuple(errors)))
    return found


def tables(content: Mapping[str, Any]) -> Iterable[Table]:
    """A row for each cache, a column for each stretch."""
    from rich import box
    from rich.table import Table

    stretch = content["settings"]["stretch"]
    found = lines(content)
    table = Table(title="nats per token of sampled text under the full model", box=box.SIMPLE)
    table.add_column("cache")
    table.add_column("texts", justify="right")
    for i in range(len(found[0].nats)):
        table.add_column(f"{i * stretch:,}-{(i + 1) * stretch:,}", justify="right")
    for line in found:
        shown = [f"{mean:.2f} \u00b1 {1.96 * error:.2f}" for mean, error in zip(line.nats, line.error, strict=True)]
        table.add_row(line.cache, str(line.n), *shown)
    yield table


def chart(content: Mapping[str, Any], file: Path) -> None:
    """Nats per token against the tokens generated."""
    from kvcache.evals.plots import colours, dashes, figure, save

    found, stretch = lines(content), content["settings"]["stretch"]
    colour, dash = (make([line.cache for line in found]) for make in (colours, dashes))
    drawing, (panel,) = figure(1, width=7)
    for line in found:
        at = [(i + 0.5) * stretch for i in range(len(line.nats))]
        error = [1.96 * each for each in line.error]
        style: dict[str, Any] = {"color": colour[line.cache], "linestyle": dash[line.cache], "capsize": 3}
        panel.errorbar(at, line.nats, error, label=line.cache, marker="o", **style)
    panel.set(xlabel="tokens generated", ylabel="nats per token under the full model", title="Text sampled for long")
    panel.set_ylim(bottom=0)
    panel.legend(frameon=False, fontsize=8)
    save(drawing, file)


def add_parser(commands: Any) -> None:
    """Register `kvcache eval drift`."""
    parser = add_command(commands, KIND, SUMMARY, EXAMPLES)
    parser.set_defaults(run=run)
    usual = Sampling()
    parser.add_argument("--cache", metavar="CACHE", dest="caches", action="append", help="beside the full one")
    parser.add_argument("--text", default="austen:northanger", help="where prompts come from")
    parser.add_argument("--prompt", metavar="N", type=positive, default=usual.prompt, help="tokens (default: 512)")
    parser.add_argument(
        "--new-tokens", dest="tokens", metavar="N", type=positive, default=usual.tokens, help="sampled (default: 600)"
    )
    parser.add_argument("--stretch", metavar="N", type=positive, default=usual.stretch, help="tokens (default: 150)")
    parser.add_argument("--temperature", metavar="T", type=float, default=usual.temperature, help="(default: 0.8)")
    parser.add_argument(
        "--repetition-penalty", metavar="P", type=float, default=usual.repetition_penalty, help="(default: 1.1)"
    )
    parser.add_argument("--repeats", metavar="N", type=positive, default=4, help="texts per cache (default: 4)")
    common_options(parser)


def run(options: argparse.Namespace) -> int:
    """`kvcache eval drift`."""
    from kvcache.evals.caches import parse_cache
    from kvcache.evals.cells import run_cells
    from kvcache.evals.record import provenance, text_record
    from kvcache.evals.texts import load_text, tokens

    sampling = Sampling(**{name: getattr(options, name) for name in Sampling.__dataclass_fields__})
    given = [str(parse_cache(each)) for each in options.caches or ["sink_h2o:slots=128"]]
    caches = list(dict.fromkeys(["full", *given]))
    text = load_text(options.text)
    model, tokenizer = load_model(options)
    prompts = tokens(text, tokenizer, sampling.prompt * options.repeats).view(options.repeats, 1, -1).to(model.device)
    cells = {
        f"{cache} seed={options.seed + i}": partial(measure, model, prompt, cache, sampling, options.seed + i)
        for i, prompt in enumerate(prompts)
        for cache in caches
    }
    record = text_record(text, prompts)
    made = provenance(options.model, dtype=model.dtype, device=model.device, seed=options.seed, texts=[record])
    header = {"provenance": made.to_dict(), "settings": asdict(sampling)}
    content = {**header, "cells": run_cells(cells, options.json, header, KIND, "sampling")}
    for table in tables(content):
        console().print(table)
    if options.png is not None:
        chart(content, options.png)
    return 0
