"""One streamed generation, with the time and the KV bytes of every token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from kvcache.cache import EvictingCache
from kvcache.routing import CACHE_ARGUMENT


@dataclass(frozen=True)
class Step:
    """One new token. length: tokens of prompt and answer up to it. seconds: since the token before it (the first:
    since the start, prefill included). kv_bytes: what the cache holds then."""

    length: int
    seconds: float
    kv_bytes: int


@dataclass(frozen=True)
class Generation:
    """What was generated and what it took. full_kv_bytes: what the cache would hold had nothing been evicted.
    evicted: tokens that each KV head of a managed layer gave up. positions: "absolute" or "cache"."""

    text: str
    prompt_tokens: int
    new_tokens: int
    kv_bytes: int
    full_kv_bytes: int
    evicted: int
    positions: str
    steps: tuple[Step, ...]

    @property
    def prefill_seconds(self) -> float:
        """Until the first new token was there."""
        return self.steps[0].seconds if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: the new tokens after the first."""
        seconds = sum(step.seconds for step in self.steps[1:])
        return (len(self.steps) - 1) / seconds if seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        rates = {"prefill_seconds": self.prefill_seconds, "tokens_per_second": self.tokens_per_second}
        return {**asdict(self), **rates}


class _Recorder(TextStreamer):
    """Hands new text to `write` and notes when each token came; writing takes no part in the times."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, cache: Cache, write: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.cache, self.write = cache, write
        self.steps: list[Step] = []
        self.texts: list[str] = []
        self.length = 0
        self.since = 0.0

    def put(self, value: Tensor) -> None:
        seconds = time.perf_counter() - self.since
        self.length += value.numel()
        if not self.next_tokens_are_prompt:
            self.steps.append(Step(self.length, seconds, kv_bytes(self.cache)))
        super().put(value)
        self.since = time.perf_counter()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.texts.append(text)
        self.write(text)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    cache: Cache,
    *,
    max_new_tokens: int,
    write: Callable[[str], object] = lambda text: None,
    **options: Any,
) -> Generation:
    """Continue `ids` `[1, tokens]` with an empty cache; text goes to `write` as soon as it is certain.

    `options` go to transformers' generate.
    """
    recorder = _Recorder(tokenizer, cache, write)
    recorder.since = time.perf_counter()
    ids = ids.to(model.device)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    arguments: Any = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": max_new_tokens,
        "pad_token_id": padding,
        "streamer": recorder,
        CACHE_ARGUMENT: cache,
        **options,
    }
    decoder: Any = model
    decoder.generate(ids, **arguments)  # under no_grad by itself
    new = len(recorder.steps)
    evicted, positions = _evictions(cache)
    return Generation(
        text="".join(recorder.texts),
        prompt_tokens=ids.shape[1],
        new_tokens=new,
        kv_bytes=kv_bytes(cache),
        full_kv_bytes=full_kv_bytes(cache),
        evicted=evicted,
        positions=positions,
        steps=tuple(recorder.steps),
    )


def kv_bytes(cache: Cache) -> int:
    """Bytes of memory that the layers of any transformers cache keep alive."""
    return sum(_layer_bytes(layer) for layer in cache.layers)


def full_kv_bytes(cache: Cache) -> int:
    """Bytes that the keys and values of all tokens seen would take: sliding and linear layers count as they are."""
    if not isinstance(cache, EvictingCache):
        return kv_bytes(cache)
    managed = {id(layer) for layer in cache.managed}
    native = sum(_layer_bytes(layer) for layer in cache.layers if id(layer) not in managed)
    return native + sum(_unevicted_bytes(part) for layer in cache.managed for part in layer.parts)


def _unevicted_bytes(layer: Any) -> int:
    if layer.keys is None:
        return 0
    slots = layer.keys.shape[2]
    return sum(tensor.nbytes // slots for tensor in (layer.keys, layer.values)) * layer.get_seq_length()


def _layer_bytes(layer: Any) -> int:
    tensors = [tensor for part in getattr(layer, "parts", [layer]) for tensor in _tensors(vars(part))]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        # A quantised tensor has no memory of its own, only the tensors that it is made of.
        flatten = getattr(value, "__tensor_flatten__", None)
        return [value] if flatten is None else _tensors([getattr(value, name) for name in flatten()[0]])
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def _evictions(cache: Cache) -> tuple[int, str]:
    if not isinstance(cache, EvictingCache):
        return 0, "absolute"
    stats = cache.stats()
    return stats.evicted, stats.positions
