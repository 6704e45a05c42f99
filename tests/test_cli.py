"""The command `kvcache`, run in this process on tiny models saved to a folder."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from kvcache.cli import main
from kvcache.models import tiny

pytestmark = pytest.mark.fast
TEMPLATE = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
PROMPT = "It is a truth universally acknowledged, that a single man in possession of a fortune wants a wife."


def _tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character: 97 with the two special ones."""
    vocabulary = {"<unk>": 0, "<end>": 1} | {chr(code): code - 30 for code in range(32, 127)}
    plain = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", eos_token="<end>")
    tokenizer.chat_template = template  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def save(folder: Path, architecture: str, template: str | None = None, **overrides: Any) -> str:
    """A tiny model and its tokenizer in a folder; the folder's name."""
    tiny.build(architecture, **overrides).save_pretrained(folder)
    _tokenizer(template).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("chatty"), "llama", TEMPLATE)


def _generate(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a successful `kvcache generate` prints."""
    assert main(["generate", *arguments]) == 0
    return capsys.readouterr().out


def _text(output: str) -> str:
    return output.split("\n  cache ")[0].rstrip()


# ---- help


@pytest.mark.parametrize("command", [[], ["generate"], ["doctor"]])
def test_help_teaches_by_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    assert "examples:\n  kvcache " in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("kvcache ")


# ---- generate


@pytest.mark.parametrize("cache", ["full", "sink_h2o", "streaming_llm"])
def test_generate_streams_and_prints_a_table(llama: str, cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = _generate(capsys, "--model", llama, "--cache", cache, "--prompt", PROMPT, "--max-new-tokens", "9")
    assert len(output) > 9
    for part in (cache, "98", "tokens per second", "KV bytes now", "KV bytes of the full cache", "tokens evicted"):
        assert part in output


def test_a_budget_that_holds_everything_changes_nothing(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--model", llama, "--prompt", PROMPT, "--max-new-tokens", "30")
    full = _text(_generate(capsys, *common, "--cache", "full"))
    assert _text(_generate(capsys, *common, "--window", "200")) == full
    assert _text(_generate(capsys, *common, "--cache", "streaming_llm", "--window", "200")) == full
    small = _generate(capsys, *common, "--window", "10", "--heavy-hitters", "4", "--margin", "1")
    assert _text(small) != full


def test_json(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    budget = ("--sinks", "2", "--window", "12", "--heavy-hitters", "10", "--margin", "8", "--positions", "cache")
    output = _generate(
        capsys, "--model", llama, "--prompt", PROMPT, "--max-new-tokens", "20", *budget, "--json", str(file)
    )
    document = json.loads(file.read_text())
    result = document["result"]
    assert document["settings"]["heavy_hitters"] == 10
    assert output.startswith(result["text"])
    assert (result["prompt_tokens"], result["new_tokens"], result["positions"]) == (98, 20, "cache")
    assert [step["length"] for step in result["steps"]] == list(range(99, 119))
    # 117 tokens seen (the last new one is not read again), 3 layers, 2 KV heads, keys and values of 12 floats
    assert result["full_kv_bytes"] == 117 * 3 * 2 * 24 * 4
    assert result["kv_bytes"] < result["full_kv_bytes"]
    assert result["kv_bytes"] == document["stats"]["bytes"] == result["steps"][-1]["kv_bytes"]
    assert 117 - 32 <= result["evicted"] <= 117 - 24
    assert result["prefill_seconds"] > 0
    assert result["tokens_per_second"] > 0
    assert document["stats"]["seen"] == 117


def test_json_of_the_full_cache(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    _generate(
        capsys, "--model", llama, "--cache", "full", "--prompt", "ab", "--max-new-tokens", "5", "--json", str(file)
    )
    document = json.loads(file.read_text())
    assert document["stats"] is None
    assert document["result"]["kv_bytes"] == document["result"]["full_kv_bytes"] == 6 * 3 * 2 * 24 * 4
    assert document["result"]["evicted"] == 0


def test_sliding_layers_count_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = save(tmp_path / "model", "gemma3"), tmp_path / "run.json"
    _generate(capsys, "--model", folder, "--prompt", PROMPT, "--max-new-tokens", "3", "--json", str(file))
    result = json.loads(file.read_text())["result"]
    of_a_token = 2 * 24 * 4
    sliding = 2 * (tiny.SLIDING_WINDOW - 1) * of_a_token
    assert result["full_kv_bytes"] == pytest.approx(sliding + 2 * 100 * of_a_token, rel=0.05)


def test_prompt_from_a_file_and_from_standard_input(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--model", llama, "--max-new-tokens", "8")
    expected = _text(_generate(capsys, *common, "--prompt", PROMPT))
    (tmp_path / "prompt.txt").write_text(PROMPT)
    assert _text(_generate(capsys, *common, "--prompt-file", str(tmp_path / "prompt.txt"))) == expected
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(PROMPT.encode())))
    assert _text(_generate(capsys, *common, "--prompt-file", "-")) == expected


def test_chat_is_the_default_where_there_is_a_template(chatty: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--model", chatty, "--max-new-tokens", "12")
    default = _text(_generate(capsys, *common, "--prompt", PROMPT))
    assert default == _text(_generate(capsys, *common, "--chat", "--prompt", PROMPT))
    assert default == _text(_generate(capsys, *common, "--raw", "--prompt", f"[{PROMPT}]"))
    assert default != _text(_generate(capsys, *common, "--raw", "--prompt", PROMPT))


def test_sampling_follows_its_seed(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--model", llama, "--prompt", PROMPT, "--max-new-tokens", "20", "--temperature", "1.5")
    first = _text(_generate(capsys, *common, "--seed", "1"))
    assert first == _text(_generate(capsys, *common, "--seed", "1"))
    assert first != _text(_generate(capsys, *common, "--seed", "2"))
    assert first != _text(_generate(capsys, *common, "--seed", "1", "--top-p", "0.3"))


def test_repetition_penalty(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--model", llama, "--prompt", PROMPT, "--max-new-tokens", "30")
    assert _text(_generate(capsys, *common)) != _text(_generate(capsys, *common, "--repetition-penalty", "1.5"))


@pytest.mark.parametrize("cache", ["full", "sink_h2o"])
def test_a_chunked_prefill_says_the_same(llama: str, cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--model", llama, "--prompt", PROMPT, "--max-new-tokens", "10", "--cache", cache)
    assert _text(_generate(capsys, *common, "--prefill-chunk", "7")) == _text(_generate(capsys, *common))


def test_dtype_and_device(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--model", llama, "--prompt", "ab", "--max-new-tokens", "2", "--device", "cpu", "--cache", "full")
    assert f"{3 * 3 * 2 * 24 * 2:,}" in _generate(capsys, *common, "--dtype", "bfloat16")
    assert f"{3 * 3 * 2 * 24 * 8:,}" in _generate(capsys, *common, "--dtype", "float64")


# ---- wrong input


def _refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error that goes with exit code 2."""
    try:
        code = main(arguments)
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("kvcache")
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["sing"], "invalid choice: 'sing'"),
        (["generate"], "one of the arguments --prompt --prompt-file is required"),
        (["generate", "--prompt", "a", "--prompt-file", "b"], "not allowed with"),
        (["generate", "--prompt", "a", "--chat", "--raw"], "not allowed with"),
        (["generate", "--prompt", "a", "--cache", "big"], "choose from"),
        (["generate", "--prompt", "a", "--max-new-tokens", "0"], "'0' is not a whole number from 1 on"),
        (["generate", "--prompt", "a", "--max-new-tokens", "many"], "'many' is not a whole number from 1 on"),
        (["generate", "--prompt", "a", "--prefill-chunk", "-1"], "'-1' is not a whole number from 1 on"),
        (["generate", "--prompt", "a", "--temperature", "-1"], "'-1' is not a number from 0 on"),
        (["generate", "--prompt", "a", "--temperature", "nan"], "'nan' is not a number from 0 on"),
        (["generate", "--prompt", "a", "--repetition-penalty", "0"], "'0' is not a number above 0"),
        (["generate", "--prompt", "a", "--top-p", "1.5"], "'1.5' is not above 0 and at most 1"),
        (["generate", "--prompt", "a", "--top-p", "0.5"], "--top-p wants a --temperature above 0"),
        (["generate", "--prompt", "a", "--dtype", "int8"], "choose from"),
        (["generate", "--prompt", " \n"], "the prompt (--prompt) is empty"),
        (["generate", "--prompt-file", "missing.txt"], "missing.txt"),
        (
            ["generate", "--prompt", "a", "--cache", "full", "--window", "9"],
            "--window has no meaning with --cache full",
        ),
        (["generate", "--prompt", "a", "--cache", "streaming_llm", "--heavy-hitters", "9"], "--heavy-hitters has no"),
        (["generate", "--prompt", "a", "--json", "missing/run.json"], "there is no folder"),
        (["generate", "--prompt", "a", "--model", "./missing"], "no such model: './missing'"),
        (["generate", "--prompt", "a", "--device", "toaster"], "device 'toaster' cannot be used here"),
        (["doctor", "--model", "./missing"], "no such model: './missing'"),
        (["doctor", "--config", "missing"], "holds no config.json"),
        (["doctor", "--config", "a", "--model", "b"], "not allowed with"),
    ],
)
def test_wrong_input(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in _refused(arguments, capsys)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (["--window", "-3"], "window=-3"),
        (["--window", "0"], "window=0"),
        (["--sinks", "-1"], "sinks=-1"),
        (["--heavy-hitters", "-1"], "heavy_hitters=-1"),
        (["--margin", "0"], "margin=0"),
    ],
)
def test_a_wrong_budget(llama: str, budget: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in _refused(["generate", "--model", llama, "--prompt", PROMPT, *budget], capsys)


def test_a_prompt_that_is_not_text(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt").write_bytes(b"\xff\xfe\x00")
    message = _refused(["generate", "--model", llama, "--prompt-file", str(tmp_path / "prompt")], capsys)
    assert "is not UTF-8 text" in message


def test_chat_without_a_template(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "use --raw" in _refused(["generate", "--model", llama, "--prompt", "a", "--chat"], capsys)


def test_a_model_that_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path, "bloom")
    assert "bloom" in _refused(["generate", "--model", folder, "--prompt", "abc"], capsys)
    assert _generate(capsys, "--model", folder, "--prompt", "abc", "--max-new-tokens", "2", "--cache", "full")


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_DEBUG", "1")
    with pytest.raises(ValueError, match="the prompt"):
        main(["generate", "--prompt", ""])


def test_an_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvcache.cli._budget", interrupt)
    assert main(["generate", "--prompt", "a"]) == 130
    assert "interrupted" in capsys.readouterr().err


# ---- doctor


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    for part in ("python", "torch", "transformers", "triton", "cpu"):
        assert part in output


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "qwen3_next", "mistral"])
def test_doctor_on_a_supported_model(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    tiny.build_config(architecture).save_pretrained(tmp_path)
    assert main(["doctor", "--config", str(tmp_path)]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    rows = {words[0]: words[1].strip() for words in lines if len(words) == 2}
    assert rows["supported"].startswith("yes")
    expected = {
        "llama": "3 full (3 evicting)",
        "gemma3": "2 full, 2 sliding (2 evicting)",
        "gpt2": "3 full (3 evicting)",
        "qwen3_next": "2 full, 2 linear (2 evicting)",
        "mistral": "3 sliding (0 evicting)",
    }
    assert rows["layers"] == expected[architecture]
    assert rows['positions="cache"'].startswith("no: " if architecture == "gpt2" else "yes")


@pytest.mark.parametrize("architecture", tiny.REFUSED)
def test_doctor_on_a_refused_model(architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.build_config(architecture).save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path)]) == 1
    assert "no: " in capsys.readouterr().out


# ---- bench


def test_bench_has_its_own_parser(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[list[str]] = []
    bench = ModuleType("kvcache.evals.bench")
    bench.main = lambda argv: seen.append(argv)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "kvcache.evals.bench", bench)
    assert main(["bench", "decode", "--json", "--help"]) == 0
    assert seen == [["decode", "--json", "--help"]]
