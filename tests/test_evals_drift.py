"""Long decoding: what is scored is what was sampled, under the model without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.evals import cli, drift
from tests.helpers import shared_model, tokens

SHORT = drift.Sampling(prompt=20, tokens=40, stretch=15)


def test_a_stretch_is_the_mean_surprise_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed from the ids that generate returned; the last stretch is short."""
    model, seen = shared_model("llama"), []
    generate: Any = model.generate
    monkeypatch.setattr(model, "generate", lambda *a, **k: seen.append(generate(*a, **k)) or seen[-1])
    found = drift.measure(model, tokens(1, 20), "sink_h2o:slots=12", SHORT, seed=3)
    (ids,) = seen
    assert ids.shape == (1, 60) and len(found["nats"]) == 3
    with torch.no_grad():
        surprise = -model(ids).logits.float().log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[19:, 0]
    for part, nats in zip(surprise.split(15), found["nats"], strict=True):
        assert nats == pytest.approx(float(part.mean()), abs=2e-4)


def test_the_same_seed_gives_the_same_text_with_room_for_all() -> None:
    model, prompt = shared_model("llama"), tokens(1, 20)
    roomy, full = (drift.measure(model, prompt, cache, SHORT, 5) for cache in ("sink_h2o:slots=100", "full"))
    assert roomy["nats"] == full["nats"]
    assert drift.measure(model, prompt, "full", SHORT, 6)["nats"] != full["nats"]


def test_command(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text = tmp_path / "text.txt"
    text.write_text("The garden lay behind the house, and nobody had been there for years. " * 20)
    arguments = [
        "drift",
        "--text",
        str(text),
        "--cache",
        "streaming_llm:slots=24",
        "--prompt",
        "40",
        "--new-tokens",
        "8",
    ]
    arguments += [
        "--stretch",
        "4",
        "--repeats",
        "2",
        "--json",
        str(tmp_path / "d.json"),
        "--png",
        str(tmp_path / "d.png"),
    ]
    assert cli.main(arguments) == 0
    assert "streaming_llm:slots=24" in capsys.readouterr().out
    content = json.loads((tmp_path / "d.json").read_text())
    assert [line.n for line in drift.lines(content)] == [2, 2]
    assert (tmp_path / "d.png").stat().st_size > 5_000
