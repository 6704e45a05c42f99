"""Perplexity: against one forward with an explicit mask, on tiny models and on the real one; the command, its files."""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvcache.cache import EvictingCache
from kvcache.cli import main
from kvcache.evals import perplexity
from kvcache.evals.caches import build_cache, parse_cache
from kvcache.evals.perplexity import BLOCK, chart, measure, parse_asked, ratio, score, score_recompute
from kvcache.evals.record import read_json
from kvcache.evals.texts import load_text, tokens
from kvcache.models.load import load
from tests.helpers import call, shared_model
from tests.helpers import tokens as random_ids
from tests.test_cli import save

STORY = """\
The lighthouse keeper had not spoken to anyone since the first snow. Every evening he climbed the ninety-one steps,
trimmed the wick, and wrote one line in the log: wind, sea, and the number of ships that had passed. On the last night
of February the number was one. A small boat without a sail came round the point, and in it sat a girl with a lantern
on her knees. She did not wave. She rowed straight to the foot of the rock, tied her rope to the iron ring, and called
up that the postmaster was ill and that somebody had to carry the letters. There were four of them, and all four were
addressed to him.
"""
# Natural logarithms, measured once in float32; the story is this file's own, so no model has been trained on it.
GOLDEN_MEAN, GOLDEN_FIRST = 3.55676, (19.4578, 5.5621, 3.6811, 6.2068)


@functools.cache
def real() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load("smollm2")


@functools.cache
def real_ids(count: int) -> Tensor:
    """`[1, count]`: of a text that is on every machine."""
    return tokens(load_text(argparse.__file__), real()[1], count)


def nll_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")


def visible(n: int, sinks: int, window: int, margin: int) -> Tensor:
    """`[n, n]` bool: what each query sees when every token is a forward of its own.

    With the slots used up, tokens older than the window go, down to sinks and window: before query `capacity`, and
    then before every `margin`-th.
    """
    capacity = sinks + window + margin
    query, key = torch.arange(n)[:, None], torch.arange(n)[None]
    last_eviction = capacity + (query - capacity).div(margin, rounding_mode="floor") * margin
    kept = (query < capacity) | (key < sinks) | (key >= last_eviction - window)
    return kept & (key <= query)


def masked_nll(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """One forward over all tokens with an explicit mask."""
    additive = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)
    with torch.no_grad():
        return nll_of(model(input_ids=ids, attention_mask=additive[None, None], use_cache=False).logits, ids)


# ---- scoring


@pytest.mark.fast
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_full_cache_equals_one_forward(chunk: int) -> None:
    model, ids = shared_model("llama"), random_ids(1, 65)
    with torch.no_grad():
        expected = nll_of(model(input_ids=ids).logits, ids)
    actual = score(model, ids, DynamicCache(config=model.config), chunk)
    assert actual.dtype == torch.float32 and torch.allclose(actual, expected, atol=1e-5)


@pytest.mark.fast
@pytest.mark.parametrize("margin", [1, 5])
@pytest.mark.parametrize("sinks", [0, 3])
def test_window_and_sinks_equal_a_mask(sinks: int, margin: int) -> None:
    model, ids = shared_model("llama"), random_ids(1, 64)
    spec = parse_cache(f"streaming_llm:sinks={sinks},window=9,margin={margin},positions=absolute")
    actual = score(model, ids, build_cache(spec, model.config))
    assert torch.allclose(actual, masked_nll(model, ids, visible(64, sinks, 9, margin)), atol=1e-5)


@pytest.mark.fast
def test_a_chunk_sees_what_was_kept_and_itself() -> None:
    """Chunks of 4 with 3 + 9 slots and a margin of 4: before each chunk only sinks and window are left."""
    model, ids = shared_model("llama"), random_ids(1, 61)
    spec = parse_cache("streaming_llm:sinks=3,window=9,margin=4,positions=absolute")
    query, key = torch.arange(61)[:, None], torch.arange(61)[None]
    start = query // 4 * 4
    mask = (key <= query) & ((start < 16) | (key < 3) | (key >= start - 9))
    actual = score(model, ids, build_cache(spec, model.config), chunk=4)
    assert torch.allclose(actual, masked_nll(model, ids, mask), atol=1e-5)


@pytest.mark.fast
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_recomputation_predicts_from_a_fresh_window(stride: int) -> None:
    model, ids, window = shared_model("llama"), random_ids(1, 100), 20
    actual = score_recompute(model, ids, window, stride)
    for position in range(1, 100):
        got = actual[position - 1]
        if position // BLOCK % stride:
            assert got.isnan()
            continue
        with torch.no_grad():
            logits = model(input_ids=ids[:, max(0, position - window) : position]).logits[0, -1]
        assert float(got) == pytest.approx(float(-logits.log_softmax(-1)[ids[0, position]]), abs=1e-5)


@pytest.mark.fast
def test_recomputation_with_a_window_over_all_is_the_full_cache() -> None:
    model, ids = shared_model("llama"), random_ids(1, 40)
    with torch.no_grad():
        expected = nll_of(model(input_ids=ids).logits, ids)
    assert torch.allclose(score_recompute(model, ids, window=64), expected, atol=1e-5)


@pytest.mark.fast
def test_scoring_refuses() -> None:
    model, ids = shared_model("llama"), random_ids(1, 8)
    cache = DynamicCache(config=model.config)
    for wrong in (ids[:, :1], ids.expand(2, -1), ids[0]):
        with pytest.raises(ValueError, match=r"must be one row of two tokens or more"):
            score(model, wrong, cache)
    with pytest.raises(ValueError, match="chunk=0"):
        score(model, ids, cache, chunk=0)
    for window, stride in ((0, 1), (4, 0)):
        with pytest.raises(ValueError, match="must be 1 or more"):
            score_recompute(model, ids, window, stride)
    with pytest.raises(ValueError, match="first=8 leaves none of 8"):
        measure(model, ids, parse_cache("full"), first=8)


# ---- figures


@pytest.mark.fast
def test_figures_come_from_the_log_likelihoods() -> None:
    model, ids = shared_model("llama"), random_ids(1, 100)
    result = measure(model, ids, parse_cache("full"), chunk=50, first=40, bucket=32)
    values = result.nll[39:].double()
    assert result.overall.tokens == 60
    assert result.overall.perplexity == pytest.approx(math.exp(values.mean()))
    error = math.exp(values.mean()) * float(values.std()) / math.sqrt(60)
    assert result.overall.standard_error == pytest.approx(error)
    assert [(bucket.start, bucket.stop, bucket.tokens) for bucket in result.buckets] == [
        (0, 32, 31), (32, 64, 32), (64, 96, 32), (96, 100, 4),
    ]  # fmt: skip
    assert result.buckets[1].perplexity == pytest.approx(float(result.nll[31:63].double().mean().exp()))
    document = result.to_dict()
    assert document["blocks"][0] == pytest.approx(float(result.nll[: BLOCK - 1].mean()), abs=1e-4)
    assert document["blocks"][2] == pytest.approx(float(result.nll[31:47].mean()), abs=1e-4)
    assert len(document["blocks"]) == 7
    assert result.kv_bytes > 0 and result.tokens_per_second > 0 and result.positions == "absolute"
    json.dumps(document, allow_nan=False)


@pytest.mark.fast
def test_nothing_scored_is_none_and_not_nan() -> None:
    model, ids = shared_model("llama"), random_ids(1, 80)
    result = measure(model, ids, parse_cache("recompute:window=8,stride=4"), bucket=BLOCK)
    assert [bucket.tokens for bucket in result.buckets] == [15, 0, 0, 0, 16]
    assert result.buckets[1].perplexity is None and result.buckets[1].standard_error is None
    json.dumps(result.to_dict(), allow_nan=False)


@pytest.mark.fast
def test_shares_of_slots_are_shares_of_the_tokens() -> None:
    model, ids = shared_model("llama"), random_ids(1, 80)
    small = measure(model, ids, parse_cache("window:slots=10%,margin=1"), chunk=1)
    same = measure(model, ids, parse_cache("window:slots=8,margin=1"), chunk=1)
    assert torch.equal(small.nll, same.nll) and small.kv_bytes == same.kv_bytes


@pytest.mark.fast
def test_ratio_pairs_blocks() -> None:
    base = {"block": 16, "first": 16, "blocks": [9.0, 1.0, 3.0, 2.0, None]}
    other = {"block": 16, "first": 1, "blocks": [1.0, 1.1, 3.1, 2.1, 7.0]}
    found = ratio(other, base)
    assert found is not None
    assert found[0] == pytest.approx(math.exp(0.1)) and found[1] == pytest.approx(0.0, abs=1e-6)
    uneven = ratio({**other, "blocks": [1.0, 1.0, 3.2]}, base)
    assert uneven is not None and uneven[0] == pytest.approx(math.exp(0.1))
    assert uneven[1] == pytest.approx(math.exp(0.1) * math.sqrt(0.02) / math.sqrt(2))
    assert ratio({**other, "blocks": [1.0, 1.0]}, base) is None


@pytest.mark.fast
def test_asked() -> None:
    asked = parse_asked("sink_h2o:slots=25%@512")
    assert asked.limit == 512 and str(asked.spec) == "sink_h2o:slots=25%" and asked.label == "sink_h2o 25% @512"
    assert parse_asked("full").limit is None
    for wrong in ("full@", "full@1", "full@many"):
        with pytest.raises(ValueError, match="not a number of tokens"):
            parse_asked(wrong)


# ---- the real model


@pytest.mark.model
def test_golden_values_of_the_full_cache() -> None:
    model, tokenizer = real()
    ids = tokenizer(STORY, return_tensors="pt").input_ids
    nll = score(model, ids, DynamicCache(config=model.config), chunk=32)
    assert nll[:4].tolist() == pytest.approx(GOLDEN_FIRST, abs=5e-3)
    assert float(nll.mean()) == pytest.approx(GOLDEN_MEAN, abs=2e-3)


@pytest.mark.model
@pytest.mark.parametrize(("sinks", "margin"), [(0, 1), (4, 1), (4, 8)])
def test_decoding_equals_a_mask_on_the_real_model(sinks: int, margin: int) -> None:
    model, _ = real()
    ids = real_ids(96)
    spec = parse_cache(f"streaming_llm:sinks={sinks},window=32,margin={margin},positions=absolute")
    actual = score(model, ids, build_cache(spec, model.config))
    difference = (actual - masked_nll(model, ids, visible(96, sinks, 32, margin))).abs()
    assert float(difference.max()) < 1e-3


@pytest.mark.model
def test_a_window_alone_collapses_and_sinks_rescue() -> None:
    """Chunks as long as the margin: before each of them only the slots of the budget are left."""
    model, _ = real()
    ids = real_ids(700)
    found: dict[str, float] = {}
    for name in ("full", "window", "streaming_llm", "sink_h2o"):
        spec = parse_cache(name if name == "full" else f"{name}:slots=64,margin=16,positions=absolute")
        overall = measure(model, ids, spec, chunk=16, first=128).overall
        assert overall.perplexity is not None
        found[name] = overall.perplexity
    assert found["window"] > 2.5 * found["full"], found  # 3.8 measured
    for name in ("streaming_llm", "sink_h2o"):  # 1.4 and 1.6 measured: this text repeats itself from afar
        assert found["full"] < found[name] < 0.6 * found["window"], found


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", ["sink_h2o", "streaming_llm"])
def test_evictions_equal_a_mask_of_what_was_kept(name: str) -> None:
    """What each layer and KV head held is noted at every step; one forward over all tokens then sees just that."""
    model, _ = real()
    ids = real_ids(200)
    cache = build_cache(parse_cache(f"{name}:slots=48,margin=8,positions=absolute"), model.config)
    assert isinstance(cache, EvictingCache)
    masks, actual = _decode_noting(model, ids, cache)
    other, _ = load("smollm2")
    AttentionInterface.register("noted", _noted_attention(masks))
    other.set_attn_implementation("noted")
    with torch.no_grad():
        expected = nll_of(other(input_ids=ids, use_cache=False).logits, ids)
    assert float((actual - expected).abs().max()) < 1e-3
    assert not all(torch.equal(masks[0], mask) for mask in masks) or name == "streaming_llm"


def _decode_noting(model: PreTrainedModel, ids: Tensor, cache: EvictingCache) -> tuple[list[Tensor], Tensor]:
    """Masks `[kv_heads, n, n]` of every layer, and the negative log-likelihoods."""
    n, heads = ids.shape[1], model.config.num_key_value_heads
    masks = [torch.zeros(heads, n, n, dtype=torch.bool) for _ in cache.managed]
    logits = []
    with torch.no_grad():
        for query in range(n):
            logits.append(call(model, cache, ids[:, query : query + 1]).logits)
            for layer, mask in enumerate(masks):
                mask[:, query].scatter_(1, cache.kept_positions(layer)[0], True)
    return masks, nll_of(torch.cat(logits, dim=1), ids)


def _noted_attention(masks: list[Tensor]) -> Callable[..., tuple[Tensor, None]]:
    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, scaling: float, **options: object
    ) -> tuple[Tensor, None]:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        seen = masks[module.layer_idx].repeat_interleave(group, 0)
        logits = (query @ key.mT * scaling).masked_fill(~seen, -math.inf)
        return (logits.softmax(-1) @ value).transpose(1, 2), None

    return attend


# ---- the command


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), "llama", max_position_embeddings=128)


@pytest.fixture
def book(tmp_path: Path) -> str:
    file = tmp_path / "book.txt"
    file.write_text(STORY)
    return str(file)


def _ppl(model: str, book: str, *arguments: object) -> int:
    return main(["eval", "ppl", "--model", model, "--text", book, *map(str, arguments)])


CACHES = (
    "--cache",
    "full",
    "--cache",
    "sink_h2o:slots=25%,margin=4,positions=absolute",
    "--cache",
    "streaming_llm:slots=32",
)


@pytest.mark.fast
def test_command(
    llama: str, book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a line for each row, however many digits a speed has
    file, png = tmp_path / "out" / "a.json", tmp_path / "out" / "a.png"
    arguments = (*CACHES, "--cache", "recompute:window=32,stride=2", "--cache", "full@100")
    assert _ppl(llama, book, "--tokens", 200, "--chunk", 8, *arguments, "--json", file, "--png", png) == 0
    output = capsys.readouterr().out
    assert "book.txt: tokens 1 to 200, in chunks of 8" in output and "perplexity by position" in output
    assert "longer than the trained length of 128 tokens, at absolute positions" in output
    marked = [line.split()[1] for line in output.splitlines() if line.startswith("  ! ")]
    assert marked == ["full", "sink_h2o"]
    document = read_json(file, "ppl")
    assert document["complete"] and document["settings"]["trained_length"] == 128
    assert (
        document["provenance"]["texts"][0]["name"] == "book.txt" and document["provenance"]["texts"][0]["tokens"] == 200
    )
    cell = document["cells"]["full on book.txt"]
    assert cell["perplexity"] > 1 and cell["standard_error"] > 0 and cell["beyond_trained_length"]
    assert document["cells"]["full@100 on book.txt"]["tokens"] == 100
    assert document["cells"]["streaming_llm:slots=32 on book.txt"]["positions"] == "cache"
    assert png.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.fast
def test_command_resumes(llama: str, book: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    measured: list[str] = []

    def counted(model: Any, ids: Any, spec: Any, **options: Any) -> Any:
        if measured and interrupt:
            raise KeyboardInterrupt
        measured.append(spec.name)
        return measure(model, ids, spec, **options)

    monkeypatch.setattr(perplexity, "measure", counted)
    interrupt = True
    assert _ppl(llama, book, "--tokens", 100, "--chunk", 50, *CACHES, "--json", file) == 130
    assert read_json(file)["complete"] is False and len(read_json(file)["cells"]) == 1
    interrupt = False
    assert _ppl(llama, book, "--tokens", 100, "--chunk", 50, *CACHES, "--json", file) == 0
    assert _ppl(llama, book, "--tokens", 100, "--chunk", 50, *CACHES, "--json", file) == 0
    assert measured == ["full", "sink_h2o", "streaming_llm"] and read_json(file)["complete"] is True


@pytest.mark.fast
def test_several_texts_have_a_panel_each(llama: str, book: str, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(STORY[::-1])
    file, png = tmp_path / "a.json", tmp_path / "a.png"
    assert _ppl(llama, book, "--text", other, "--tokens", 64, "--cache", "full", "--chunk", 64, "--json", file) == 0
    document = read_json(file)
    assert set(document["cells"]) == {"full on book.txt", "full on other.txt"}
    chart(document, png)
    assert png.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache", "h2o"], "unknown cache 'h2o': there are full, window"),
        (["--cache", "window:slot=4"], "unknown option 'slot'"),
        (["--cache", "full@x"], "not a number of tokens"),
        (["--cache", "full", "--cache", "window:slots=9,window=10"], "cannot be divided"),
        (["--cache", "sink_h2o:margin=0"], "margin=0"),
        (["--tokens", "100000"], "'book.txt' has 608 tokens, 100,000 are needed"),
        (["--tokens", "100", "--from", "100"], "--from 100 leaves none"),
    ],
)
def test_wrong_input(
    llama: str, book: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _ppl(llama, book, "--tokens", 50, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.fast
def test_a_file_of_another_schema_kind_or_measurement(
    llama: str, book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    run = functools.partial(_ppl, llama, book, "--cache", "full", "--chunk", 50, "--json", file)
    assert run("--tokens", 50) == 0
    assert run("--tokens", 60) == 2
    assert "another measurement" in capsys.readouterr().err
    for content, message in (({"schema": 0}, "schema 0"), ({"schema": 1, "kind": "plan"}, "kvcache eval plan")):
        file.write_text(json.dumps(content))
        assert run("--tokens", 50) == 2
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.fast
def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["eval", "ppl", "--help"])
    assert caught.value.code == 0 and "examples:\n  kvcache eval ppl" in capsys.readouterr().out
