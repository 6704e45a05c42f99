"""Spreading the work: cells over the processes of `accelerate launch`, a large model over the devices of a machine.

Processes are told apart by the variables that `accelerate launch` and torchrun set (RANK, WORLD_SIZE, LOCAL_RANK). They
measure disjoint cells and meet once, at the end; nothing else is exchanged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

PATIENCE = timedelta(days=7)  # for the slowest process; torch's half hour is shorter than one cell may be
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def rank() -> int:
    """This process's number among `world()`, from 0."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """How many processes share the work; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def share(keys: Sequence[T]) -> list[T]:
    """What this process measures: every world-th key, so that neighbours, which cost alike, go to different ones."""
    return list(keys[rank() :: world()])


def part(file: Path) -> Path:
    """Where this process keeps its finished cells: `file` itself when it is alone, else a file of its own beside it."""
    return file if world() == 1 else file.with_name(f"{file.name}.{rank()}-of-{world()}")


def parts(file: Path) -> list[Path]:
    """The files that processes of any launch have left beside `file`, however many processes that had."""
    return sorted(file.parent.glob(f"{file.name}.*-of-*"))


def gather(results: Mapping[str, T]) -> dict[str, T] | None:
    """All processes' results in process 0, None in the others. Every process has to call it, once each time.

    Raises RuntimeError (torch's) where another process has gone.
    """
    if world() == 1:
        return dict(results)
    import torch.distributed as distributed

    group = _group(distributed)
    everyone: list[Any] | None = [None] * world() if rank() == 0 else None
    distributed.gather_object(dict(results), everyone, group=group)
    if everyone is None:
        return None
    return {key: value for one in everyone for key, value in one.items()}


def _group(distributed: Any) -> Any:
    """Processes that can exchange Python objects without a GPU, whatever the others in this program have set up."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", timeout=PATIENCE)
    return distributed.new_group(backend="gloo", timeout=PATIENCE)


def local_device(device: str) -> str:
    """`device`, made this process's own: "cuda" is the GPU of its LOCAL_RANK; anything more precise stays."""
    local = os.environ.get("LOCAL_RANK")
    return f"{device}:{local}" if device in ("cuda", "xpu") and local is not None else device


def spread(
    model: PreTrainedModel,
    device_map: str | Mapping[str, Any] = "auto",
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
) -> PreTrainedModel:
    """The model, dispatched over the devices of this machine by accelerate; each layer's slots follow its keys.

    Args:
        device_map: "auto", "balanced", "balanced_low_0" or "sequential", or a mapping from module names to devices
            ("cpu" and "disk" among them: their weights come in when they are used).
        max_memory: what each device may take ({0: "20GiB", "cpu": "60GiB"}); None: what is free.
        offload_folder: where weights go whose place is "disk".

    Raises:
        ValueError: accelerate is not installed, or an unknown name of a map.
    """
    try:
        from accelerate import dispatch_model
    except ImportError as error:
        raise ValueError("a device map takes accelerate: pip install 'kvcache-evict[accelerate]'") from error
    places = _inferred(model, device_map, max_memory) if isinstance(device_map, str) else dict(device_map)
    dispatch_model(model, places, offload_dir=offload_folder)  # in place
    return model


def _inferred(model: PreTrainedModel, name: str, max_memory: Mapping[int | str, int | str] | None) -> dict[str, Any]:
    """Where each module goes, from what is free."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if name not in DEVICE_MAPS:
        raise ValueError(f"unknown device map {name!r}: {', '.join(DEVICE_MAPS)}, or a mapping")
    model.tie_weights()  # said to accelerate, which would count and place tied weights twice
    whole: dict[str, Any] = {"no_split_module_classes": _unsplit(model), "dtype": model.dtype}
    memory: Any = dict(max_memory) if max_memory else None
    if name != "sequential":
        memory = get_balanced_memory(model, memory, low_zero=name == "balanced_low_0", **whole)
    return dict(infer_auto_device_map(model, memory, **whole))


def _unsplit(model: PreTrainedModel) -> list[str]:
    """Classes of modules that stay on one device: what transformers itself says of the model."""
    return sorted(getattr(model, "_no_split_modules", None) or [])
