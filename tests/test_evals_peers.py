"""kvpress in a process of its own: what can be said without it, and what it measures where it is installed."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.evals import peers
from kvcache.evals.caches import build_cache, parse_cache
from kvcache.evals.continuation import continuation, once
from kvcache.evals.peers import PEERS, Peer, PeerError, PeerProcess, parse_peers
from tests.helpers import tokens

STUB = """
import json, sys
print("loading", json.loads(sys.stdin.readline())["model"], file=sys.stderr)
print(json.dumps({"versions": {"kvpress": "0"}}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if job["measure"] == "die":
        sys.exit("out of memory")
    print(json.dumps({"error": "ValueError: no"} if job["measure"] == "fail" else {"echo": job}), flush=True)
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerProcess]:
    """A process that answers without kvpress."""
    file = tmp_path / "stub.py"
    file.write_text(STUB)
    monkeypatch.setattr(peers, "RUNNER", file)
    with PeerProcess("folder", python=Path(sys.executable)) as process:
        yield process


def test_names() -> None:
    assert parse_peers(["all"]) == PEERS
    assert parse_peers(["snapkv", "kvpress:decoding:tova", "snapkv"]) == (Peer("snapkv"), Peer("tova", decoding=True))
    assert len({str(peer) for peer in PEERS}) == len(PEERS) == len({peer.label for peer in PEERS})
    assert peers.label("kvpress:decoding:tova") == "kvpress DecodingPress(TOVAPress)"
    with pytest.raises(ValueError, match=r"no peer 'h2o': all, streaming_llm, .*decoding:knorm"):
        parse_peers(["h2o"])


def test_jobs_and_their_failures(stub: PeerProcess) -> None:
    assert stub.versions == {}, "nothing starts before the first job"
    assert stub.ask({"measure": "x", "n": 1})["echo"] == {"measure": "x", "n": 1}
    assert stub.versions == {"kvpress": "0"}
    with pytest.raises(PeerError, match="kvpress: ValueError: no"):
        stub.ask({"measure": "fail"})
    assert "echo" in stub.ask({"measure": "y"}), "a failed job does not end the process"
    with pytest.raises(PeerError, match="ended: loading folder out of memory"):
        stub.ask({"measure": "die"})
    stub.close()
    assert "echo" in stub.ask({"measure": "z"}), "it can be started again"


def test_a_python_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.PYTHON, "/no/such/python")
    with pytest.raises(PeerError, match=f"{peers.PYTHON} names '/no/such/python', which is no file"):
        peers.environment()


def test_the_environment_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(peers.PYTHON, raising=False)
    monkeypatch.setenv("KVCACHE_HOME", str(tmp_path))
    commands: list[list[str]] = []

    def note(command: list[str]) -> None:
        commands.append(command)
        (Path(peers._folder()) / "bin").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(peers, "_check", note)
    assert not peers.ready()
    python = peers.environment()
    assert python.is_relative_to(tmp_path / "peers") and peers.ready()
    assert len(commands) == 2 and peers.environment() == python and len(commands) == 2
    assert f"torch=={torch.__version__.partition('+')[0]}" in commands[1]
    assert all("==" in each or "<" in each for each in peers.requirements()), "versions are pinned"


def test_a_failed_installation_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(peers.PYTHON, raising=False)
    monkeypatch.setenv("KVCACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PeerError, match=f"failed while making .* name its Python in {peers.PYTHON}"):
        peers.environment()
    assert not peers.ready()


def test_the_runner_stands_alone() -> None:
    tree = ast.parse(peers.RUNNER.read_text())
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add(str(node.module).partition(".")[0])
    assert roots - set(sys.stdlib_module_names) == {"torch", "transformers", "kvpress"}


# ---- with kvpress

kvpress = pytest.mark.skipif(
    not peers.ready(),
    reason=f"kvpress' environment is not there: kvcache eval compare --peers makes it, or {peers.PYTHON}",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoModelForCausalLM

    from kvcache.models import tiny
    from kvcache.models.load import load_config

    folder = tmp_path_factory.mktemp("model")
    tiny.build("llama", dtype=torch.float32).save_pretrained(folder)
    assert load_config(folder).model_type == "llama"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def process(model: Any) -> Iterator[PeerProcess]:
    with PeerProcess(peers.weights_of(model)) as running:
        yield running


@kvpress
@pytest.mark.parametrize(("press", "cache"), [(None, "full"), ("streaming_llm", "streaming_llm:slots=24")])
def test_the_same_method_gives_the_same(process: PeerProcess, model: Any, press: str | None, cache: str) -> None:
    ids = tokens(1, 96)
    job = {"measure": "score", "press": press, "budget": 24, "prefill": ids[0, :64].tolist()}
    theirs = process.ask({**job, "then": ids[0, 64:].tolist()})
    spec = parse_cache(cache if press is None else cache + ",positions=absolute")
    ours = continuation(model, build_cache(once(spec, 32), model.config), ids, 64)
    assert theirs["kept"] == ours.kept == (64 if press is None else 24)
    assert theirs["nll"] == pytest.approx(ours.nll.tolist(), abs=1e-4)


@kvpress
@pytest.mark.parametrize("press", peers.PREFILL_PRESSES)
def test_every_press_keeps_the_budget(process: PeerProcess, press: str) -> None:
    ids = tokens(1, 133)[0].tolist()
    job = {"press": press, "budget": 70, "prefill": ids[:129]}
    answer = process.ask({"measure": "generate", **job, "then": ids[129:], "new_tokens": 3, "stop": []})
    assert len(answer["tokens"]) == 3 and answer["kept"] == 70
    per_token = 3 * 2 * 2 * 12 * 4  # layers, keys and values, KV heads, dimensions, bytes
    assert answer["kv_bytes"] == 70 * per_token
    speed = process.ask({"measure": "speed", **job, "then": ids[129:]})
    assert len(speed["seconds"]) == 4 and min(speed["seconds"]) > 0


@kvpress
@pytest.mark.parametrize("press", peers.DECODING_PRESSES)
def test_decoding_presses_stay_near_the_budget(process: PeerProcess, press: str) -> None:
    ids = tokens(1, 120)[0].tolist()
    answer = process.ask({"measure": "stream", "press": press, "budget": 40, "ids": ids, "chunk": 4, "every": 8})
    assert len(answer["nll"]) == 119 and 40 <= answer["kept"] <= 48


@kvpress
def test_an_unknown_press_and_a_missing_model(process: PeerProcess) -> None:
    with pytest.raises(PeerError, match="KeyError: 'h2o'"):
        process.ask({"measure": "score", "press": "h2o", "budget": 4, "prefill": [1, 2, 3, 4, 5, 6], "then": [3]})
    with PeerProcess(os.devnull) as broken, pytest.raises(PeerError, match="process ended"):
        broken.ask({"measure": "score"})
