"""What fits into a GPU, against numbers worked out by hand for two known configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from kvcache.evals import plan
from kvcache.evals.caches import parse_cache
from kvcache.evals.cli import main
from kvcache.evals.record import read_json
from kvcache.evals.units import parse_bytes, show_bytes
from kvcache.models import tiny

pytestmark = pytest.mark.fast
GIB = 1 << 30
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def _config(settings: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(**settings)


def _plan(settings: dict[str, Any], *caches: str, memory: int = 80 * GIB, **options: Any) -> plan.Plan:
    options = {"reserve": 8 * GIB, "dtype": torch.bfloat16, **options}
    return plan.plan(_config(settings), [parse_cache(cache) for cache in caches], memory, **options)


# ---- models


def test_llama_3_8b() -> None:
    needs = plan.model_needs(_config(LLAMA_3_8B), torch.bfloat16)
    embeddings, norms = 2 * 128256 * 4096, (2 * 32 + 1) * 4096
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert needs.parameters == embeddings + norms + 32 * layer == 8_030_261_248
    assert needs.weight_bytes == 16_060_522_496
    assert needs.token_bytes == 2 * 32 * 8 * 128 * 2 == 131_072
    assert (needs.trained_length, needs.layers, needs.uncounted) == (8192, "32 full", 0)


def test_smollm2_whose_embeddings_are_tied() -> None:
    needs = plan.model_needs(_config(SMOLLM2), torch.float32)
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
    assert needs.parameters == 49152 * 576 + 30 * layer + 576 == 134_515_008
    assert needs.weight_bytes == 4 * 134_515_008
    assert needs.token_bytes == 46_080


def test_quantised_weights() -> None:
    assert (
        plan.model_needs(_config(LLAMA_3_8B), torch.bfloat16, weight_bits=4.5).weight_bytes == 8_030_261_248 * 9 // 16
    )


def test_counting_parameters_equals_the_model() -> None:
    for architecture in ("llama", "gpt2", "mixtral", "qwen3_next"):
        expected = sum(parameter.numel() for parameter in tiny.build(architecture).parameters())
        assert plan.count_parameters(tiny.build_config(architecture)) == expected


# ---- what fits


def test_full_cache_of_llama_3_8b() -> None:
    result = _plan(LLAMA_3_8B, "full", batches=(1, 8), lengths=(4096, 131072))
    (cache,) = result.caches
    assert result.room == 72 * GIB - 16_060_522_496 == 61_248_888_832
    assert cache.longest == ((1, 467_291), (8, 58_411))  # 61,248,888,832 / 131,072 = 467,291.9
    assert cache.largest_batch == ((4096, 114), (131072, 3))
    assert dict(cache.sequence_bytes)[4096] == 512 << 20


def test_budget_of_llama_3_8b() -> None:
    result = _plan(LLAMA_3_8B, "sink_h2o:slots=4096", batches=(1, 100), lengths=(4096, 131072))
    (cache,) = result.caches
    heads = 32 * 8 * (4096 + 32)  # slots and margin
    absolute, ranked = heads * (2 * 128 * 2 + 8), heads * (3 * 128 * 2 + 8)
    sizes = dict(cache.sequence_bytes)
    assert sizes[4096] == sizes[8192] == absolute == 549_519_360
    assert sizes[8193] == sizes[131072] == ranked == 820_051_968
    assert cache.largest_batch == ((4096, 111), (131072, 74))
    # 100 sequences fit until the second copy of the keys is wanted, at the end of the trained length
    assert cache.longest == ((1, None), (100, 8192))


def test_a_share_of_the_length_grows() -> None:
    (cache,) = _plan(SMOLLM2, "streaming_llm:slots=25%,margin=1", lengths=(1000, 2000), dtype=torch.float32).caches
    sizes = dict(cache.sequence_bytes)
    assert sizes[1000] == 30 * 3 * 251 * (3 * 64 * 4 + 8)
    assert sizes[2000] == 30 * 3 * 501 * (3 * 64 * 4 + 8)
    assert cache.longest[0][1] is not None


def test_sliding_layers_stop_growing() -> None:
    config, window = tiny.build_config("gemma3"), tiny.SLIDING_WINDOW
    needed = plan.demand(parse_cache("full"), config, torch.float32)
    of_a_token = 2 * (12 + 12) * 4  # KV heads, keys and values, bytes
    assert needed(10, 1) == 4 * 10 * of_a_token
    assert needed(500, 3) == 3 * (2 * 500 + 2 * (window - 1)) * of_a_token


def test_weights_alone_may_be_too_much() -> None:
    result = _plan(LLAMA_3_8B, "full", "sink_h2o:slots=1024", memory=12 * GIB, reserve=0, lengths=(4096,))
    assert result.room < 0
    for cache in result.caches:
        assert cache.largest_batch == ((4096, 0),)
        assert {tokens for _, tokens in cache.longest} == {0}


def test_longest_is_exact() -> None:
    for room in (0, 99, 100, 101, 12_345):
        assert plan.longest(lambda length, batch: 100 * length * batch, room, 2) == room // 200
    assert plan.longest(lambda length, batch: 50, 50, 1) is None
    assert plan.longest(lambda length, batch: 50, 49, 1) == 0


# ---- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 << 30), ("24GB", 24 * 10**9), ("1.5 TiB", 3 << 39), ("512mib", 512 << 20), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["80", "80G", "GiB", "-1GiB", "0GiB", "many", ""])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="80GiB"):
        parse_bytes(text)


def test_sizes_are_shown_with_three_digits() -> None:
    sizes = (0, 999, 1 << 20, 15 << 30, 512 << 20, 1000 << 20)
    assert [show_bytes(size) for size in sizes] == ["0 B", "999 B", "1.00 MiB", "15.0 GiB", "512 MiB", "0.98 GiB"]


def test_reserve() -> None:
    assert plan.parse_reserve("10%", 1000) == 100
    assert plan.parse_reserve("2GiB", 1000) == 2 << 30
    assert plan.parse_reserve("0", 1000) == 0
    for text in ("100%", "-5%", "x%"):
        with pytest.raises(ValueError, match="share of the memory"):
            plan.parse_reserve(text, 1000)


# ---- the command


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    file = tmp_path / "llama.json"
    file.write_text(json.dumps(LLAMA_3_8B))
    return str(file)


def test_command(config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "plan.json", tmp_path / "plan.png"]
    arguments = ["plan", "--memory", "80GiB", "--model", config_file, "--json", str(files[0]), "--png", str(files[1])]
    for _ in range(2):  # a plan is written over a plan
        assert main(arguments) == 0
    output = capsys.readouterr().out
    for part in ("8,030,261,248", "131,072 B", "467,291 *", "any", "57.0 GiB", "8,192 tokens"):
        assert part in output
    content = read_json(files[0], "plan")
    assert content["model"]["token_bytes"] == 131_072
    assert content["settings"]["memory"] == 80 << 30
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_command_says_when_nothing_fits(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory", "12GiB", "--model", config_file, "--cache", "full"]) == 0
    assert "nothing: 4.16 GiB too little" in capsys.readouterr().out


def test_folder_and_linear_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.build_config("qwen3_next").save_pretrained(tmp_path)
    assert main(["plan", "--memory", "1GiB", "--model", str(tmp_path)]) == 0
    assert "the state of 2 linear layers" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "missing.json"], "no such config file"),
        (["--model", "./missing"], "no such model"),
        (["--model", "MODEL", "--cache", "big"], "unknown cache 'big'"),
        (["--model", "MODEL", "--cache", "recompute"], "for kvcache eval ppl only"),
        (["--model", "MODEL", "--reserve", "120%"], "share of the memory"),
    ],
)
def test_wrong_input(arguments: list[str], message: str, config_file: str) -> None:
    with pytest.raises(ValueError, match=message):
        main(["plan", "--memory", "80GiB", *(config_file if word == "MODEL" else word for word in arguments)])


@pytest.mark.parametrize("content", ["{", "[1]", "{}", '{"model_type": "nothing"}', '{"model_type": "t5"}'])
def test_files_that_are_no_config_of_a_decoder(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config|encoder"):
        main(["plan", "--memory", "80GiB", "--model", str(tmp_path / "config.json")])


@pytest.mark.parametrize("arguments", [["--memory", "80"], ["--memory", "8GiB", "--weight-bits", "0"], []])
def test_wrong_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_another_result_is_not_overwritten(config_file: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"schema": 1, "kind": "ppl"}')
    with pytest.raises(ValueError, match="ppl, not of plan"):
        main(["plan", "--memory", "80GiB", "--model", config_file, "--json", str(file)])
