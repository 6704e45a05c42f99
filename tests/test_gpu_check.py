"""`scripts/gpu_check --smoke`: everything that it does on a GPU, at tiny sizes with interpreted kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcache.evals import gpu_check

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "TRITON_INTERPRET": "1"}
    command = [str(ROOT / "scripts" / "gpu_check"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def test_the_smoke_run_writes_every_part(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    result = run("--smoke", "--skip", "tests", "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr[-2000:]
    content = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {row["part"] for row in content["rows"]} == set(gpu_check.PARTS) - {"tests"}
    assert all(row["seconds"] > 0 or "share of a step" in row["what"] for row in content["rows"])
    assert not any(row["held"] is not None for row in content["rows"]), "times of the interpreter judge nothing"
    assert content["about"]["smoke"]
    assert content["about"]["copy_bytes_per_second"] > 0
    assert (tmp_path / "gpu_check.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gpu_check.json", "gpu_check.png"]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "says"),
    [((), "no CUDA GPU here"), (("--smoke", "--skip", "decode,nothing"), "nothing: the parts are tests, decode")],
)
def test_wrong_input(
    arguments: tuple[str, ...],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main([*arguments, "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.fast
def test_the_full_run_has_the_sizes_that_the_targets_are_about() -> None:
    """A change of one must not go unnoticed."""
    assert (64, 8192) in {(batch, slots) for batch in gpu_check.FULL.batches for slots in gpu_check.FULL.slots}
    assert gpu_check.FULL.seen[-1] == 131072
    assert gpu_check.FULL.heads == (32, 8, 128)
