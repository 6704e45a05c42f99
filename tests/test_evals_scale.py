"""Cells over processes, a model over devices."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.evals import scale
from kvcache.evals.caches import build_cache, parse_cache
from tests.helpers import call, model_of, tokens

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
PROGRAM = """
import sys, os
from pathlib import Path
from kvcache.evals import cells, scale

def measure(key):
    return lambda: {"key": key, "process": scale.rank()}

keys = ["a", "b", "c", "d", "e"]
try:
    found = cells.run_cells({key: measure(key) for key in keys}, Path(sys.argv[1]), {"settings": {}}, "test", "test")
except cells.OtherProcess:
    print("other", scale.rank())
else:
    print(list(found), [cell["process"] for cell in found.values()])
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


def test_alone_everything_is_mine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (scale.rank(), scale.world()) == (0, 1)
    assert scale.share("abc") == list("abc")
    assert scale.part(tmp_path / "r.json") == tmp_path / "r.json"
    assert scale.gather({"a": 1}) == {"a": 1}
    assert scale.local_device("cuda") == "cuda"


@pytest.mark.parametrize("world", [2, 3, 7])
def test_shares_are_disjoint_and_complete(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    keys = list("abcde")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    shares = []
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        shares.append(scale.share(keys))
    assert sorted(key for one in shares for key in one) == keys
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_each_process_has_its_file_and_its_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    file = scale.part(tmp_path / "r.json")
    assert file.name == "r.json.1-of-2"
    file.touch()
    assert scale.parts(tmp_path / "r.json") == [file]
    assert scale.local_device("cuda") == "cuda:1"
    assert scale.local_device("cuda:0") == "cuda:0" and scale.local_device("cpu") == "cpu"


def test_two_processes_measure_one_grid(program: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    environment = {**ENVIRONMENT, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(result)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    assert ended[0][0].splitlines() == ["['a', 'b', 'c', 'd', 'e'] [0, 1, 0, 1, 0]"]
    assert ended[1][0].splitlines() == ["other 1"]
    _check_result(result)


def test_accelerate_launch(program: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    result = tmp_path / "result.json"
    # On a machine without a GPU too: this is what makes accelerate start more than one process without MPI.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_port", str(_free_port()), str(program), str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    _check_result(result)


def _check_result(file: Path) -> None:
    document = json.loads(file.read_text())
    assert document["complete"] and sorted(document["cells"]) == list("abcde")
    assert {cell["process"] for cell in document["cells"].values()} == {0, 1}
    assert scale.parts(file) == [], "the processes' own files go when all is there"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# ---- a model over devices


@pytest.mark.parametrize("name", ["full", "sink_h2o:slots=16,margin=4", "streaming_llm:slots=12,margin=1"])
@pytest.mark.parametrize("place", ["auto", "offloaded"])
def test_a_dispatched_model_gives_the_same(tmp_path: Path, name: str, place: str) -> None:
    pytest.importorskip("accelerate")
    ids = tokens(1, 48)
    spec = parse_cache(name)
    expected = _logits(model_of("llama"), spec, ids)
    model = model_of("llama")
    device_map: Any = "auto" if place == "auto" else _offloaded(model)
    spread = scale.spread(model, device_map, offload_folder=tmp_path)
    assert torch.equal(_logits(spread, spec, ids), expected)
    if place == "offloaded":
        devices = {str(parameter.device) for parameter in spread.parameters()}
        assert devices == {"cpu", "meta"}, "weights on the disk come in only while they are used"


def _offloaded(model: Any) -> dict[str, str]:
    """The middle layer on the disk, the rest in memory."""
    names = [name for name, _ in model.model.named_children() if name != "layers"]
    places = {f"model.{name}": "cpu" for name in names} | {"lm_head": "cpu"}
    return places | {f"model.layers.{index}": "disk" if index == 1 else "cpu" for index in range(3)}


def _logits(model: Any, spec: Any, ids: torch.Tensor) -> torch.Tensor:
    cache = build_cache(spec, model.config)
    with torch.no_grad():
        return torch.cat([call(model, cache, part).logits for part in (ids[:, :30], *ids[:, 30:].split(1, dim=1))], 1)


def test_unknown_device_map() -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match="unknown device map 'both': auto, balanced"):
        scale.spread(model_of("llama"), "both")
