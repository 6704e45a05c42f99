"""kvcache eval memory on a tiny model: exact bytes, flat and growing caches, resuming; and the meter beneath it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvcache.evals import memory, process_memory
from kvcache.evals.caches import parse_cache
from kvcache.evals.cli import main
from kvcache.evals.memory import Limits, Measurement, Point
from kvcache.evals.process_memory import Meter
from kvcache.evals.record import read_json
from kvcache.models import tiny
from tests.test_cli import save

pytestmark = pytest.mark.fast
LENGTHS = (64, 128, 256)
OF_A_TOKEN = 3 * 2 * (12 + 12) * 4  # layers, KV heads, keys and values, bytes
OF_A_SLOT = OF_A_TOKEN + 3 * 2 * 8  # and its score and position
FULL, BOUNDED = "full", "sink_h2o:sinks=2,window=14,heavy_hitters=16,margin=8"
SLOTS = 2 + 14 + 16 + 8


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.build("llama")


def _points(model: PreTrainedModel, cache: str, mode: str, lengths: tuple[int, ...] = LENGTHS) -> list[Point]:
    measurement = Measurement(model, lengths, chunk=24, steps=5)
    return [measurement.point(parse_cache(cache), mode, length) for length in lengths]


def _bytes(model: PreTrainedModel, cache: str, mode: str) -> list[int]:
    return [point.kv_bytes for point in _points(model, cache, mode)]


# ---- measuring


@pytest.mark.parametrize("mode", ["one-shot", "chunks"])
def test_the_full_cache_grows(model: PreTrainedModel, mode: str) -> None:
    assert _bytes(model, FULL, mode) == [OF_A_TOKEN * length for length in LENGTHS]


def test_the_full_cache_grows_while_decoding(model: PreTrainedModel) -> None:
    assert _bytes(model, FULL, "decode") == [OF_A_TOKEN * (length + 6) for length in LENGTHS]  # one warms up


@pytest.mark.parametrize("mode", list(memory.MODES))
def test_an_evicting_cache_is_flat(model: PreTrainedModel, mode: str) -> None:
    assert _bytes(model, BOUNDED, mode) == [OF_A_SLOT * SLOTS] * 3


def test_a_share_of_the_length_grows(model: PreTrainedModel) -> None:
    sizes = _bytes(model, "sink_h2o:slots=25%,margin=8", "chunks")
    assert sizes == [OF_A_SLOT * (length // 4 + 8) for length in LENGTHS]


def test_a_cache_reads_on_and_starts_again_where_it_must(model: PreTrainedModel) -> None:
    measurement = Measurement(model, LENGTHS, chunk=24, steps=5)
    spec = parse_cache(FULL)
    order = [("chunks", 64), ("decode", 64), ("decode", 128), ("chunks", 128), ("chunks", 64), ("one-shot", 128)]
    points = [measurement.point(spec, mode, length) for mode, length in order]
    steps = [6 if mode == "decode" else 0 for mode, _ in order]
    assert [p.kv_bytes for p in points] == [
        OF_A_TOKEN * (length + more) for (_, length), more in zip(order, steps, strict=True)
    ]
    for point in points:
        assert point.milliseconds > 0
        assert point.mean_milliseconds > 0
        assert point.peak_bytes >= 0


def test_what_was_read_so_far_is_not_read_again(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    read = memory.Stream._read
    monkeypatch.setattr(memory.Stream, "_read", lambda self, size: sizes.append(size) or read(self, size))
    measurement = Measurement(model, (48, 96), chunk=24, steps=5)
    for length in (48, 96):
        for mode in ("chunks", "decode"):
            measurement.point(parse_cache(FULL), mode, length)
    assert sizes == [24, 24, *[1] * 6, 24, 18, *[1] * 6]


def test_random_tokens_follow_the_seed(model: PreTrainedModel) -> None:
    ids = [Measurement(model, (64,), seed=seed).ids for seed in (1, 1, 2)]
    assert torch.equal(ids[0], ids[1])
    assert not torch.equal(ids[0], ids[2])
    assert int(ids[0].max()) < tiny.VOCABULARY


@pytest.mark.parametrize("lengths", [(), (64, 64), (64, 69), (128, 64)])
def test_wrong_lengths(model: PreTrainedModel, lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"no lengths|further apart"):
        Measurement(model, lengths, steps=5)


def test_unknown_mode(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="one-shot, chunks, decode"):
        _points(model, FULL, "twice")


def test_limits() -> None:
    limits = Limits(full=1000, one_shot=500)
    assert limits.allow("chunks", 1000, bounded=False)
    assert not limits.allow("chunks", 1001, bounded=False)
    assert limits.allow("decode", 64000, bounded=True)
    assert limits.allow("one-shot", 500, bounded=True)
    assert not limits.allow("one-shot", 501, bounded=True)


# ---- the meter


@pytest.fixture
def promptly() -> Iterator[None]:
    with process_memory.freed_at_once():
        yield


@pytest.mark.usefixtures("promptly")
def test_meter_sees_what_comes_and_goes() -> None:
    size = 64 << 20
    meter = Meter()
    with meter.peak() as first:
        torch.ones(size // 4)
    with meter.peak() as second:
        pass
    assert first[0] == pytest.approx(size, rel=0.1)
    assert second[0] < size / 4
    kept = torch.ones(size // 4)
    assert meter.now() == pytest.approx(kept.nbytes, rel=0.1)
    with meter.peak() as third:
        pass
    assert third[0] == pytest.approx(size, rel=0.1)
    assert "process" in meter.what


def test_meter_without_a_process_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "_STATM", Path("/nowhere/statm"))
    with pytest.raises(ValueError, match="measure on Linux"):
        Meter()


def test_meter_counts_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"cuda:0": 100, "cuda:1": 10}
    devices = [torch.device(name) for name in (*held, "cpu", "cuda:0")]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held[str(device)])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * held[str(device)])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    meter = Meter(devices)
    with meter.peak() as peak:
        held["cuda:1"] = 30
    assert "device" in meter.what
    assert meter.now() == 20
    assert peak == [5 * 130 - 110]


# ---- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), "llama", max_position_embeddings=128)


def _arguments(folder: str, *more: str) -> list[str]:
    caches = ("--cache", FULL, "--cache", BOUNDED)
    limits = ("--full-limit", "128", "--one-shot-limit", "64")
    lengths = ("--lengths", "256", "64", "128", "160")
    return ["memory", "--model", folder, *caches, *limits, *lengths, "--chunk", "32", "--steps", "4", *more]


def test_command(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    files = tmp_path / "memory.json", tmp_path / "memory.png"
    assert main(_arguments(folder, "--json", str(files[0]), "--png", str(files[1]))) == 0
    output = capsys.readouterr().out
    for part in ("prefill in one forward", "prefill in chunks of 32", "decode, 4 steps", "160, 256", "not measured"):
        assert part in output
    assert "trained length" not in output  # no cache with absolute positions went past it
    assert files[1].read_bytes().startswith(b"\x89PNG")
    content = read_json(files[0], "memory")
    assert content["complete"]
    assert content["provenance"]["model"] == folder
    measured = {(cell["cache"], cell["mode"], cell["length"]) for cell in content["cells"].values()}
    assert (FULL, "chunks", 128) in measured and (FULL, "chunks", 160) not in measured
    assert (BOUNDED, "decode", 256) in measured and (BOUNDED, "one-shot", 128) not in measured


def test_beyond_the_trained_length_is_said(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_arguments(folder, "--full-limit", "256", "--modes", "chunks")) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "beyond the trained length of 128 tokens" in output


def test_resuming_measures_only_what_is_missing(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "memory.json"
    point = Measurement.point
    asked: list[tuple[str, int]] = []

    def failing(self: Measurement, spec: Any, mode: str, length: int) -> Point:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append((mode, length))
        return point(self, spec, mode, length)

    monkeypatch.setattr(Measurement, "point", failing)
    with pytest.raises(KeyboardInterrupt):
        main(_arguments(folder, "--json", str(file)))
    content = json.loads(file.read_text())
    assert not content["complete"]
    assert len(content["cells"]) == 3
    assert len(list(memory.tables(content))) == 2
    monkeypatch.setattr(Measurement, "point", point)
    assert main(_arguments(folder, "--json", str(file))) == 0
    finished = json.loads(file.read_text())
    assert finished["complete"]
    assert {key: finished["cells"][key] for key in content["cells"]} == content["cells"]
    with pytest.raises(ValueError, match=r"another measurement \(chunk"):
        main([*_arguments(folder, "--json", str(file)), "--chunk", "16"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache", "big"], "unknown cache 'big'"),
        (["--cache", "sink_h2o:slots=0"], "slots=0"),
        (["--cache", "recompute"], "for kvcache eval ppl only"),
        (["--cache", "full", "--full-limit", "10"], "beyond the limits"),
        (["--cache", "full", "--lengths", "64", "66"], "further apart"),
    ],
)
def test_wrong_input(arguments: list[str], message: str, folder: str) -> None:
    with pytest.raises(ValueError, match=message):
        main(["memory", "--model", folder, *arguments])
