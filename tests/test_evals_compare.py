"""The comparison: its protocols on small models, its table and chart from made-up cells, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from kvcache.evals import compare
from kvcache.evals.caches import CacheSpec, build_cache, parse_cache
from kvcache.evals.compare import Material, Ours, Protocol
from kvcache.evals.continuation import continuation, decode_speed, kept_tokens, once
from tests.helpers import call, shared_model, tokens

PROTOCOL = Protocol(tokens=80, first=16, chunk=4, length=48, continuations=2, continued=16, steps=6, depths=(0.5,))


# ---- the protocols


def test_continuation_with_the_full_cache_is_one_forward() -> None:
    model, ids = shared_model("llama"), tokens(1, 40)
    result = continuation(model, build_cache(CacheSpec("full"), model.config), ids, 30)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, 29:-1].float()
    assert result.kept == 30
    assert torch.allclose(result.nll, cross_entropy(logits, ids[0, 30:], reduction="none"), atol=1e-5)


@pytest.mark.parametrize("name", ["window", "streaming_llm", "sink_h2o"])
def test_nothing_is_dropped_behind_the_prompt(name: str) -> None:
    model, ids = shared_model("llama"), tokens(1, 48)
    spec = once(parse_cache(f"{name}:slots=12,margin=1"), 20)
    cache = build_cache(spec, model.config)
    result = continuation(model, cache, ids, 36)
    assert result.kept == 12 and kept_tokens(cache) == 12 + 11
    single = build_cache(spec, model.config)
    with torch.no_grad():
        logits = [call(model, single, part).logits[:, -1:] for part in (ids[:, :36], *ids[:, 36:-1].split(1, dim=1))]
    expected = cross_entropy(torch.cat(logits, 1)[0].float(), ids[0, 36:], reduction="none")
    assert torch.allclose(result.nll, expected, atol=1e-5), "one forward or single tokens: the same"


def test_a_cache_without_a_margin_stays_as_it_is() -> None:
    assert once(CacheSpec("full"), 20) == CacheSpec("full")
    assert str(once(parse_cache("window:window=3,margin=2,positions=cache"), 9)) == (
        "window:window=3,positions=cache,margin=9"
    )


@pytest.mark.parametrize("prefill", [0, 40, 41])
def test_nothing_to_continue(prefill: int) -> None:
    model = shared_model("llama")
    for measure in (continuation, decode_speed):
        with pytest.raises(ValueError, match="cannot be had from ids"):
            measure(model, build_cache(CacheSpec("full"), model.config), tokens(1, 40), prefill)


def test_cells_of_our_caches() -> None:
    model = shared_model("llama")
    prompts = tokens(2, 64, seed=1)
    material = Material(PROTOCOL, tokens(1, 80), prompts, builder=None)  # pyright: ignore[reportArgumentType]
    subject = Ours(model, CacheSpec("sink_h2o"), 16)
    assert str(subject) == "sink_h2o:slots=16" and subject.name == "sink_h2o"
    assert set(subject.cells(material, [3])) == {
        *("stream", "continuation", "speed"),
        *("needle known seed=3", "needle afterwards seed=3"),
    }
    stream, after, speed = (subject.cells(material, [])[name]() for name in ("stream", "continuation", "speed"))
    assert stream["tokens"] == 64 and len(stream["blocks"]) == 5 and stream["first"] == 16
    assert math.log(stream["perplexity"]) == pytest.approx(sum(stream["blocks"][1:]) / 4, abs=1e-3)
    assert after["tokens"] == 32 and len(after["blocks"]) == 2 and after["kept"] == 16
    assert speed["tokens_per_second"] > 0 and speed["kv_bytes"] > 0
    json.dumps([stream, after, speed], allow_nan=False)


def test_blocks_of_a_stream_are_by_position() -> None:
    nll = [float(position) for position in range(1, 40)]
    cell = compare.stream_cell(nll, first=32, seconds=1.0, kv_bytes=5)
    assert cell["blocks"] == [8.0, 23.5, 35.5] and cell["tokens"] == 8
    assert cell["perplexity"] == pytest.approx(math.exp(35.5))
    assert compare.continuation_cell([[1.0] * 20, [2.0] * 16], 7)["blocks"] == [1.0, 1.0, 2.0]


# ---- what is refused


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ("sink_h2o:slots=512", "size of its own .slots."),
        ("window:window=3", "size of its own .window."),
        ("recompute", "keeps no cache"),
        ("nothing", "unknown cache"),
    ],
)
def test_caches_that_cannot_be_compared(cache: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare.parse_caches([cache])


def test_the_full_cache_comes_first_and_once() -> None:
    assert [str(spec) for spec in compare.parse_caches(["window", "full", "window"])] == ["full", "window"]


def test_budgets_that_are_none() -> None:
    with pytest.raises(ValueError, match="a budget of 40 slots is no budget for prompts of 48 tokens"):
        PROTOCOL.check([8, 40])
    with pytest.raises(ValueError, match="--from 90 leaves none"):
        Protocol(first=90, tokens=90).check([8])


# ---- table and chart


def content() -> dict[str, Any]:
    """A result as a file holds it, out of order, with peers."""
    cells: dict[str, dict[str, Any]] = {}

    def add(cache: str, slots: int | None, level: float, **others: Any) -> None:
        blocks = [1.0, 2.0, 3.0, 4.0]
        more = {"block": 16, "first": 0, "kv_bytes": 2048}
        worse = [block + level + 0.01 * index for index, block in enumerate(blocks)] if level else blocks
        for measure in ("stream", "continuation"):
            if compare.why_not(cache, measure) is None:
                cells[f"{measure} {cache} {slots}"] = {"measure": measure, "blocks": worse, **more, **others}
        for ask, exact in (("known", [True, True]), ("afterwards", [True, False])):
            for seed in (0, 1):
                if compare.why_not(cache, f"needle {ask}") is None:
                    found = {"measure": f"needle {ask}", "seed": seed, "exact": exact, "parts": [1.0, 0.5]}
                    cells[f"{ask}{seed} {cache} {slots}"] = {**found, **others}
        if compare.why_not(cache, "speed") is None:
            cells[f"speed {cache} {slots}"] = {"measure": "speed", "tokens_per_second": 12.34, "kv_bytes": 1 << 20}
        for key, cell in cells.items():
            if key.endswith(f"{cache} {slots}"):
                cell.update(cache=cache, slots=slots)

    versions = {"versions": {"kvpress": "0.5.5", "transformers": "5.2.0"}}
    add("window", 256, 0.5)
    add("window", 512, 0.25)
    add("full", None, 0.0)
    add("kvpress:snapkv", 512, 0.1, **versions)
    add("kvpress:decoding:tova", 512, 0.1, **versions)
    made = {"model": "m", "dtype": "float32", "texts": [{"name": "novel", "tokens": 9}], "threads": 1}
    made |= {"device_name": "cpu", "command": "kvcache eval compare"}
    settings = {**vars(PROTOCOL), "depths": [0.5]}
    return {"provenance": made, "settings": settings, "cells": cells}


def test_rows() -> None:
    found = compare.rows(content())
    assert [(row.cache, row.slots) for row in found] == [
        ("full", None),
        ("window", 512),
        ("kvpress:snapkv", 512),
        ("kvpress:decoding:tova", 512),
        ("window", 256),
    ]
    full, window = found[0].figures, found[1].figures
    assert full["stream"] == compare.Figure(1.0, 1.0, 1.0)
    ratio = window["stream"]
    assert ratio is not None and ratio.low is not None and ratio.low < ratio.value
    assert ratio.value == pytest.approx(math.exp(0.265))
    needle = window["needle afterwards"]
    assert needle is not None and needle.value == 0.5 and needle.low == pytest.approx(0.15, abs=0.01)
    assert found[2].figures["stream"] is None and found[3].figures["needle known"] is None


def test_markdown_says_why_something_is_missing() -> None:
    text = compare.markdown(content())
    lines = text.splitlines()
    width = lines[0].count("|")
    assert all(line.count("|") == width for line in lines[:7])
    assert "| kvpress SnapKVPress | 512 | - (a) | 1.122" in text
    (decoding,) = [line for line in lines if line.startswith("| kvpress DecodingPress(TOVAPress) | 512 | 1.122")]
    assert decoding.count("| - (b) |") == 2 and decoding.count("(b)") == 4 and decoding.endswith(" KiB |")
    assert f"(a) {compare.PREFILL_ONLY}." in text and f"(b) {compare.DECODING_ONLY}." in text
    assert "kvpress 0.5.5 with transformers 5.2.0" in text and "4 questions" in text


def test_a_partial_result_is_shown(tmp_path: Path) -> None:
    part = content()
    part["cells"] = {key: cell for key, cell in part["cells"].items() if "window" in key and "speed" not in key}
    assert "| window | 512 |  |  | 100%" in compare.markdown(part), "no ratio without the full cache"
    assert compare.tables(part)


def test_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "pictures" / "compare.png"
    compare.chart(content(), file)
    assert file.read_bytes().startswith(b"\x89PNG")


# ---- the command


@pytest.mark.model
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from kvcache.cli import main

    text = tmp_path / "text.txt"
    text.write_text("The sea was calm that day. We sailed to the north of the island. Nobody spoke a word. " * 40)
    files = {name: tmp_path / f"result.{name}" for name in ("json", "md", "png")}
    command = ["eval", "compare", "--text", str(text), "--slots", "32", "--cache", "streaming_llm", "--device", "cpu"]
    for option, value in (("tokens", 96), ("from", 32), ("chunk", 16), ("length", 96), ("continuations", 2)):
        command += [f"--{option}", str(value)]
    command += ["--continued", "32", "--steps", "3", "--seeds", "1", "--depths", "0.5", "--threads", "1"]
    for name, file in files.items():
        command += [f"--{name}", str(file)]
    assert main(command) == 0
    result = json.loads(files["json"].read_text())
    assert result["complete"] and result["kind"] == "compare" and len(result["cells"]) == 10
    assert "| streaming_llm | 32 | " in files["md"].read_text() and files["png"].stat().st_size > 1000
    capsys.readouterr()
    result["cells"]["speed of full"]["tokens_per_second"] = 77.7
    files["json"].write_text(json.dumps(result))
    assert main(command) == 0
    assert "77.7" in capsys.readouterr().out, "what the file holds is not measured again"
