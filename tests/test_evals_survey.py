"""The survey: one reading for many budgets must answer what a reading for each of them answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.evals import cli, survey
from kvcache.evals.caches import build_cache
from kvcache.evals.haystack import Builder, form, sentences
from kvcache.evals.needle import Case
from kvcache.evals.needle import Needles as PlainNeedles
from kvcache.models.load import load

TEXT = " ".join(
    f"It was on day {i} that the {w} of the garden came to the house." for i, w in enumerate("abcdefghij" * 12)
)
CACHES = ["full", "sink_h2o", "snapkv:window=16", "streaming_llm", "key_diff"]


@pytest.fixture(scope="module")
def pretrained() -> Any:
    return load("smollm2")


@pytest.fixture(scope="module")
def builder(pretrained: Any) -> Builder:
    _, tokenizer = pretrained
    return Builder(sentences(TEXT, tokenizer), tokenizer, form("raw", tokenizer))


@pytest.mark.parametrize("cache", CACHES)
def test_the_same_answers_as_a_reading_for_each(pretrained: Any, builder: Builder, cache: str) -> None:
    """Two needles of 300 tokens at 40 %: text, exactness and what was kept of each answer."""
    model, _ = pretrained
    depths, length, slots = (0.2, 0.7), 300, 120
    measured = survey.Needles(model, builder, depths, [40.0]).measure(cache, length, seed=3)["answers"]
    for answer in measured:
        case = Case(str(survey.sized(cache, slots)), length, answer["ask"], "several", "digits", 3)
        trials = PlainNeedles(model, builder, depths).measure(case)
        assert answer["parts"] == pytest.approx([trial.parts for trial in trials], abs=1e-4)
        assert answer["exact"] == [trial.exact for trial in trials]
        assert answer["kept"] == pytest.approx([trial.kept_answer for trial in trials], abs=0.02)  # near ties


def test_streams_are_rows(pretrained: Any) -> None:
    """Two texts at once give what each gives alone."""
    from kvcache.evals.perplexity import score

    model, tokenizer = pretrained
    ids = torch.tensor(tokenizer(TEXT).input_ids[:400]).view(2, 200)
    found = survey.Streams(model, ids, ["one", "two"], first=64, chunk=16).measure("sink_h2o", 48)["texts"]
    for name, row in zip(("one", "two"), ids, strict=True):
        nll = score(model, row[None], build_cache(survey.sized("sink_h2o", 48), model.config), 16)
        assert found[name]["perplexity"] == pytest.approx(float(nll[63:].mean().exp()), rel=2e-3)
        assert found[name]["tokens"] == 199 - 63


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    files = [tmp_path / name for name in ("s.json", "s.png", "s.md")]
    arguments = [
        "survey",
        "--text",
        str(text),
        "--streams",
        str(text),
        "--cache",
        "snapkv:window=16",
        "--lengths",
        "250",
    ]
    arguments += ["--seeds", "1", "--shares", "50", "--tokens", "200", "--from", "64", "--slots", "32", "48"]
    for flag, file in zip(("--json", "--png", "--md"), files, strict=True):
        arguments += [flag, str(file)]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "question known" in shown and "question afterwards" in shown and "text.txt at 32" in shown
    content = json.loads(files[0].read_text())
    assert len(content["cells"]) == 2 + 3  # full's stream has no size
    assert files[1].stat().st_size > 10_000
    assert files[2].read_text().count("| snapkv:window=16 |") == 3
    assert survey.answers(content)[0].n == len(survey.DEPTHS)


@pytest.mark.parametrize(
    ("cache", "why"), [("quantized", "no budget"), ("snapkv:slots=64", "size of its own"), ("nothing", "unknown cache")]
)
def test_wrong_caches(cache: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        survey.written([cache])
