"""What fits into a GPU: weights, KV bytes per token, the longest sequence and the largest batch, from a config alone.

No weights are loaded: parameters are counted on a model without storage. The reserve stands for all that is neither
weights nor KV cache (activations, the copy of one layer that transformers' full cache makes at each token, the CUDA
context, fragmentation); it is a choice, not a measurement.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.evals.cli import add_command, common_options, console, positive
from kvcache.evals.units import parse_bytes, show_bytes

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from rich.table import Table
    from transformers import PreTrainedConfig

    from kvcache.evals.caches import CacheSpec

KIND = "plan"
EXAMPLES = """\
examples:
  kvcache eval plan --memory 80GiB --model meta-llama/Meta-Llama-3-8B
  kvcache eval plan --memory 24GB --model path/to/config.json --cache full --cache sink_h2o:slots=4096
  kvcache eval plan --memory 16GiB --model smollm2 --batches 1 16 256 --png plan.png
  kvcache eval plan --memory 24GiB --model path/to/model --weight-bits 4 --reserve 3GiB
"""
CACHES = ("full", "sink_h2o:slots=4096", "sink_h2o:slots=1024")
LENGTHS = (4096, 32768, 131072)
BATCHES = (1, 8, 64)
GIBIBYTE = 1 << 30
MOST_TOKENS = 1 << 40  # what still fits at this length fits at any
FIRST_CURVE_LENGTH = 256

KVBytes = Callable[[int, int], int]
"""Bytes of a cache that has seen `length` tokens in `batch` rows: `(length, batch) -> bytes`."""


# ---- what a model needs


@dataclass(frozen=True)
class ModelNeeds:
    """A model's memory, in bytes. token_bytes: keys and values of one token in all layers that grow with the length.

    layers: how many of which kind. uncounted: of those, the layers whose state of constant size is left out.
    """

    model_type: str
    dtype: str
    parameters: int
    weight_bytes: int
    token_bytes: int
    trained_length: int | None
    layers: str
    uncounted: int


def model_needs(config: PreTrainedConfig, dtype: torch.dtype, weight_bits: float | None = None) -> ModelNeeds:
    """Weights and KV bytes of the model that `config` describes.

    Args:
        dtype: of the cache and, without `weight_bits`, of the weights.
        weight_bits: bits per parameter of quantised weights, scales included.

    Raises:
        UnsupportedModelError, ValueError: a model that the engine, or transformers, does not know.
    """
    from kvcache.models.spec import describe

    spec = describe(config)
    kinds = [layer.kind for layer in spec.layers]
    parameters = count_parameters(config)
    return ModelNeeds(
        model_type=spec.model_type,
        dtype=str(dtype).removeprefix("torch."),
        parameters=parameters,
        weight_bytes=int(parameters * (weight_bits or dtype.itemsize * 8) / 8),
        token_bytes=sum(_token_bytes(layer, dtype) for layer in spec.layers if layer.managed),
        trained_length=spec.trained_length,
        layers=", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))),
        uncounted=kinds.count("linear"),
    )


def count_parameters(config: PreTrainedConfig) -> int:
    """Parameters of a model, tied ones once; nothing is allocated.

    Raises:
        ValueError: transformers has no causal language model for this config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except (ValueError, KeyError, AttributeError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"no causal language model can be made from this config ({config.model_type}): {error}"
        ) from error
    return sum(parameter.numel() for parameter in model.parameters())


def read_config(name: str) -> PreTrainedConfig:
    """The config of `smollm2`, a hub id, a folder, a .gguf file or a config's JSON file.

    Raises:
        ValueError: there is none, or it is not a model's config.
    """
    from transformers import AutoConfig

    from kvcache.models.load import load_config

    path = Path(name).expanduser()
    if path.suffix != ".json":
        return load_config(name)
    if not path.is_file():
        raise ValueError(f"no such config file: {name!r}")
    try:
        return AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name!r} is not the config of a model that transformers knows: {error}") from error


# ---- what a cache needs


def demand(spec: CacheSpec, config: PreTrainedConfig, dtype: torch.dtype) -> KVBytes:
    """How many bytes a cache takes after a length, for a batch.

    An evicting cache's slots are allocated at once, so it takes them at any length; with positions="auto" the second
    copy of its keys counts from the trained length on.

    Raises:
        ValueError: a cache that is neither transformers' full one nor an evicting one.
    """
    from transformers import DynamicCache

    from kvcache.cache import EvictingCache
    from kvcache.evals.caches import build_cache
    from kvcache.memory import estimate_bytes
    from kvcache.models.spec import describe

    config = copy.deepcopy(config)  # an evicting cache routes the config that it is made from
    trained = describe(config).trained_length
    relative = isinstance(spec.get("slots", 0), str)  # a share of the length

    @cache
    def build(length: int | None) -> Any:
        return build_cache(spec, config, length)

    def native(length: int, batch: int) -> int:
        return _native_bytes(config, length, batch, dtype)

    def full(length: int, batch: int) -> int:
        return native(length, batch) + length * batch * _growing_bytes(config, dtype)

    def evicting(length: int, batch: int) -> int:
        cache = build(length if relative else None)
        past = cache.positions == "auto" and trained is not None and length > trained
        positions = "cache" if past else cache.positions
        return native(length, batch) + estimate_bytes(config, cache.budget, batch, dtype, positions)

    example = build(LENGTHS[0] if relative else None)
    if isinstance(example, EvictingCache):
        return evicting
    if type(example) is DynamicCache:
        return full
    raise ValueError(f"--cache {spec}: plan knows what transformers' full cache and the evicting caches take, not this")


def _token_bytes(layer: Any, dtype: torch.dtype) -> int:
    return layer.kv_heads * (layer.head_dim + layer.v_head_dim) * dtype.itemsize


def _growing_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    from kvcache.models.spec import describe

    return sum(_token_bytes(layer, dtype) for layer in describe(config).layers if layer.managed)


def _native_bytes(config: PreTrainedConfig, length: int, batch: int, dtype: torch.dtype) -> int:
    """Bytes of the sliding-window layers, which keep one token less than their window."""
    from transformers import DynamicCache

    from kvcache.models.spec import decoder_config, describe

    native: list[Any] = DynamicCache(config=decoder_config(config)).layers
    return sum(
        _token_bytes(layer, dtype) * min(length, mine.sliding_window - 1) * batch
        for layer, mine in zip(describe(config).layers, native, strict=True)
        if layer.kind == "sliding"
    )


# ---- what fits


@dataclass(frozen=True)
class CachePlan:
    """One cache in the memory that is left, as pairs.

    sequence_bytes: (length, bytes of one sequence). longest: (batch, longest sequence in tokens; None: any).
    largest_batch: (length, most sequences of that length).
    """

    cache: str
    sequence_bytes: tuple[tuple[int, int], ...]
    longest: tuple[tuple[int, int | None], ...]
    largest_batch: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes. room: what weights and reserve leave to the KV cache; below 0 where not even these fit."""

    memory: int
    reserve: int
    room: int
    model: ModelNeeds
    caches: tuple[CachePlan, ...]


def plan(
    config: PreTrainedConfig,
    specs: Sequence[CacheSpec],
    memory: int,
    *,
    reserve: int,
    dtype: torch.dtype,
    weight_bits: float | None = None,
    lengths: Sequence[int] = LENGTHS,
    batches: Sequence[int] = BATCHES,
) -> Plan:
    """What fits into `memory` bytes beside the weights and `reserve` bytes.

    Raises:
        UnsupportedModelError, ValueError: see `model_needs` and `demand`.
    """
    needs = model_needs(config, dtype, weight_bits)
    room = memory - reserve - needs.weight_bytes
    curve = _curve_lengths(lengths, needs.trained_length)
    caches = tuple(_cache_plan(spec, demand(spec, config, dtype), room, curve, lengths, batches) for spec in specs)
    return Plan(memory, reserve, room, needs, caches)


def _cache_plan(
    spec: CacheSpec, needed: KVBytes, room: int, curve: Sequence[int], lengths: Sequence[int], batches: Sequence[int]
) -> CachePlan:
    return CachePlan(
        cache=str(spec),
        sequence_bytes=tuple((length, needed(length, 1)) for length in curve),
        longest=tuple((batch, longest(needed, room, batch)) for batch in batches),
        largest_batch=tuple((length, max(0, room // needed(length, 1))) for length in lengths),
    )


def longest(needed: KVBytes, room: int, batch: int) -> int | None:
    """The most tokens that `batch` sequences may have each in `room` bytes; None: any number."""
    if needed(MOST_TOKENS, batch) <= room:
        return None
    fits, too_long = 0, MOST_TOKENS
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if needed(middle, batch) <= room else (fits, middle)
    return fits


def _curve_lengths(lengths: Sequence[int], trained: int | None) -> list[int]:
    """Half octaves up to twice the longest, the lengths themselves, and both sides of the trained length."""
    octaves = range(2 * (2 * max(lengths) // FIRST_CURVE_LENGTH).bit_length() - 1)
    end = round(FIRST_CURVE_LENGTH * 2 ** (octaves[-1] / 2)) if octaves else max(lengths)
    step = {trained, trained + 1} if trained is not None and trained < end else set()
    return sorted({round(FIRST_CURVE_LENGTH * 2 ** (step / 2)) for step in octaves} | set(lengths) | step)


# ---- what people see


def tables(content: Mapping[str, Any]) -> Iterator[Table]:
    """The tables of a result: the model, the longest sequence, the largest batch, and the bytes of a sequence."""
    yield _model_table(content)
    cells = content["cells"].values()
    trained = content["model"]["trained_length"]
    longest_caption = (
        f"* beyond the trained length of {trained:,} tokens, where a cache that keeps absolute positions fits but the "
        "model no longer follows"
    )
    table = _table(
        "longest sequence in tokens, each of a batch",
        [f"batch {batch:,}" for batch, _ in next(iter(cells))["longest"]],
        {cell["cache"]: [_show_longest(cell["cache"], each, trained) for _, each in cell["longest"]] for cell in cells},
    )
    if any("*" in text for column in table.columns for text in map(str, column.cells)):
        table.caption = longest_caption
    yield table
    lengths = [length for length, _ in next(iter(cells))["largest_batch"]]
    heads = [f"{length:,} tokens" for length in lengths]
    batches = {cell["cache"]: [f"{batch:,}" for _, batch in cell["largest_batch"]] for cell in cells}
    yield _table("most sequences at once, each of a length", heads, batches)
    sizes = {cell["cache"]: [show_bytes(dict(cell["sequence_bytes"])[length]) for length in lengths] for cell in cells}
    table = _table("KV cache of one sequence", heads, sizes)
    if trained is not None and any(_doubles(dict(cell["sequence_bytes"]), trained) for cell in cells):
        table.caption = f'beyond {trained:,} tokens positions="auto" keeps a second copy of the keys, at their ranks'
    yield table


def _doubles(sizes: Mapping[int, int], trained: int) -> bool:
    """Whether one token more than the trained length costs far more than a token."""
    return trained + 1 in sizes and sizes[trained + 1] > 1.1 * sizes[trained]


def _table(title: str, heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE, title_justify="left", caption_justify="left")
    table.add_column("cache", overflow="fold")
    for head in heads:
        table.add_column(head, justify="right")
    for name, values in rows.items():
        table.add_row(name, *values)
    return table


def _model_table(content: Mapping[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    model, settings = content["model"], content["settings"]
    name = content["provenance"]["model"]
    weights = f"{settings['weight_bits']:g} bits each" if settings["weight_bits"] else model["dtype"]
    table = Table(title=f"{name} in {show_bytes(settings['memory'])}", box=box.SIMPLE, title_justify="left")
    table.add_column("what")
    table.add_column("how much", justify="right")
    for row in (
        ("parameters", f"{model['parameters']:,}"),
        (f"weights ({weights})", show_bytes(model["weight_bytes"])),
        ("reserve for all else", show_bytes(settings["reserve"])),
        ("left for the KV cache", _show_room(content["room"])),
        (f"KV cache of one token ({model['dtype']})", f"{model['token_bytes']:,} B"),
        ("layers", model["layers"]),
        ("trained length", f"{model['trained_length']:,} tokens" if model["trained_length"] else "not said"),
    ):
        table.add_row(*row)
    if model["uncounted"]:
        table.caption = f"the state of {model['uncounted']} linear layers, of constant size, is not counted"
    return table


def _show_room(room: int) -> str:
    return show_bytes(room) if room >= 0 else f"nothing: {show_bytes(-room)} too little"


def _show_longest(cache: str, tokens: int | None, trained: int | None) -> str:
    if tokens is None:
        return "any"
    absolute = cache == "full" or "positions=absolute" in cache
    return f"{tokens:,}" + (" *" if absolute and trained is not None and tokens > trained else "")


def chart(content: Mapping[str, Any], file: Path) -> None:
    """Memory against length, one panel per batch: weights and reserve below, the caches on top, the GPU's memory."""
    from kvcache.evals.plots import figure, save

    batches = [batch for batch, _ in next(iter(content["cells"].values()))["longest"]]
    drawing, panels = figure(len(batches), columns=3, width=4.6)
    for panel, batch in zip(panels, batches, strict=True):
        _batch_panel(panel, content, batch)
    handles, names = panels[0].get_legend_handles_labels()
    drawing.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
    title = f"{content['provenance']['model']} in {show_bytes(content['settings']['memory'])}"
    drawing.suptitle(f"{title}, {content['model']['dtype']} cache")
    save(drawing, file)


def _batch_panel(panel: Axes, content: Mapping[str, Any], batch: int) -> None:
    from kvcache.evals.caches import parse_cache
    from kvcache.evals.plots import colours, dashes

    settings = content["settings"]
    base = settings["memory"] - content["room"]
    labels = {name: parse_cache(name).label for name in content["cells"]}
    colour, dash = colours(list(labels.values())), dashes(list(labels.values()))
    lengths = [length for length, _ in next(iter(content["cells"].values()))["sequence_bytes"]]
    for name, cell in content["cells"].items():
        total = [(base + batch * size) / GIBIBYTE for _, size in cell["sequence_bytes"]]
        style: dict[str, Any] = {"color": colour[labels[name]], "linestyle": dash[labels[name]], "linewidth": 2.2}
        panel.plot(lengths, total, label=labels[name], **style)
    panel.axhspan(0, base / GIBIBYTE, color="#8a8a8a", alpha=0.15, linewidth=0, label="weights and reserve")
    panel.axhline(settings["memory"] / GIBIBYTE, color="#c0392b", linewidth=1.5, label="the GPU's memory")
    if content["model"]["trained_length"]:
        panel.axvline(
            content["model"]["trained_length"], color="black", linestyle=":", linewidth=1, label="trained length"
        )
    panel.set_xscale("log", base=2)
    panel.set_xlim(lengths[0], lengths[-1])
    panel.set_ylim(0, 1.3 * max(settings["memory"], base) / GIBIBYTE)
    shown = [length for length in lengths if length.bit_count() == 1][::2]
    panel.set_xticks(shown, [_short(length) for length in shown])
    panel.minorticks_off()
    panel.set(title=f"batch {batch:,}", xlabel="length of each sequence (tokens)", ylabel="GiB")


def _short(length: int) -> str:
    """Powers of two as they are spoken of: 64k, 1M."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if length >= size:
            return f"{length // size}{unit}"
    return str(length)


# ---- the command


def add_parser(commands: Any) -> None:
    """`kvcache eval plan`."""
    parser = add_command(commands, "plan", "What fits into a GPU, from a model's config: nothing is loaded.", EXAMPLES)
    common_options(parser)
    parser.add_argument("--memory", metavar="SIZE", type=_size, required=True, help="of the GPU: 80GiB, 24GB, ...")
    parser.add_argument(
        "--reserve",
        metavar="SIZE|P%",
        default="10%",
        help="left to activations and all else: a size, or a share of --memory (default: 10%%)",
    )
    parser.add_argument(
        "--weight-bits", metavar="N", type=_bits, help="bits per parameter of quantised weights (default: as --dtype)"
    )
    parser.add_argument(
        "--cache", metavar="SPEC", action="append", help=f"again for more (default: {', '.join(CACHES)})"
    )
    parser.add_argument(
        "--lengths", metavar="N", type=positive, nargs="+", default=list(LENGTHS), help="lengths in tokens"
    )
    parser.add_argument("--batches", metavar="N", type=positive, nargs="+", default=list(BATCHES), help="batch sizes")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the tables, and write and draw them where asked."""
    from transformers.utils import logging

    from kvcache.evals.record import read_json, write_json

    logging.set_verbosity_error()
    if options.json is not None and options.json.exists():
        read_json(options.json, KIND)  # only a plan is overwritten
    content = _content(options)
    for table in tables(content):
        console().print(table)
    if options.json is not None:
        write_json(options.json, KIND, content)
    if options.png is not None:
        chart(content, options.png)
    return 0


def _content(options: argparse.Namespace) -> dict[str, Any]:
    """The result, as its file holds it."""
    import torch

    from kvcache.evals.caches import parse_cache
    from kvcache.evals.record import provenance

    specs = [parse_cache(text) for text in options.cache or CACHES]
    config = read_config(options.model)
    dtype = getattr(torch, options.dtype or "bfloat16")
    lengths, batches = sorted(set(options.lengths)), sorted(set(options.batches))
    result = plan(
        config,
        specs,
        options.memory,
        reserve=parse_reserve(options.reserve, options.memory),
        dtype=dtype,
        weight_bits=options.weight_bits,
        lengths=lengths,
        batches=batches,
    )
    sizes = {"memory": result.memory, "reserve": result.reserve, "weight_bits": options.weight_bits}
    return {
        "provenance": provenance(options.model, dtype=dtype, device="cpu", seed=options.seed).to_dict(),
        "settings": {**sizes, "lengths": lengths, "batches": batches},
        "complete": True,
        "room": result.room,
        "model": asdict(result.model),
        "cells": {cache.cache: asdict(cache) for cache in result.caches},
    }


def parse_reserve(text: str, memory: int) -> int:
    """Bytes of a size, or of a share such as `10%` of `memory`.

    Raises:
        ValueError: neither of them, or a share that is not at least 0% and below 100%.
    """
    if text.strip() in ("0", "0%"):
        return 0
    if not text.strip().endswith("%"):
        return parse_bytes(text)
    try:
        share = float(text.strip().removesuffix("%"))
    except ValueError:
        share = -1.0
    if not 0 <= share < 100:
        raise ValueError(f"{text!r} is not a share of the memory: at least 0% and below 100%, or a size such as 2GiB")
    return int(memory * share / 100)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _bits(text: str) -> float:
    try:
        bits = float(text)
    except ValueError:
        bits = 0.0
    if not 1 <= bits <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bits from 1 to 64")
    return bits
