"""What a compressed prompt is worth: the perplexity of what follows it, and how fast and how big it is.

The protocol that caches which compress once, after the prefill, and caches which evict all the time can both follow:
`prefill` tokens are read in one forward and brought down to the budget; the tokens behind them are scored in a second
forward, in which nothing is dropped any more. So only the choice of what is kept makes the difference.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache, PreTrainedModel

    from kvcache.evals.caches import CacheSpec


@dataclass(frozen=True)
class Continuation:
    """nll: `[tokens]` fp32 on the CPU, in nats, of the tokens behind the prefill. kept: tokens that the fullest layer
    held after the prefill."""

    nll: Tensor
    kept: int


@dataclass(frozen=True)
class Speed:
    """seconds: of each single-token forward behind the prefill, evictions included. kv_bytes: after the prefill."""

    seconds: tuple[float, ...]
    kv_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """Without the first token, for which buffers and code paths are made ready."""
        timed = self.seconds[1:] or self.seconds
        return len(timed) / sum(timed)


def takes(spec: CacheSpec, option: str) -> bool:
    """Whether that cache has the option."""
    from kvcache.evals.caches import REGISTRY

    return option in inspect.signature(REGISTRY[spec.name]).parameters


def once(spec: CacheSpec, tokens: int) -> CacheSpec:
    """The same cache, with so large a margin that after an eviction `tokens` more fit without another one."""
    if not takes(spec, "margin"):
        return spec
    others = tuple(option for option in spec.options if option[0] != "margin")
    return replace(spec, options=(*others, ("margin", tokens)))


def continuation(model: PreTrainedModel, cache: Cache, ids: Tensor, prefill: int) -> Continuation:
    """Score ids[prefill:] behind ids[:prefill], with an empty cache.

    Args:
        ids: `[1, n]` int64.

    Raises:
        ValueError: no token to prefill, or none to score.
    """
    import torch
    from torch.nn.functional import cross_entropy

    _check(ids, prefill)
    with torch.no_grad():
        first = _forward(model, cache, ids[:, :prefill], last_only=True)
        kept = kept_tokens(cache)
        rest = _forward(model, cache, ids[:, prefill:-1], last_only=False) if ids.shape[1] > prefill + 1 else None
    logits = first if rest is None else torch.cat([first, rest], dim=1)
    return Continuation(cross_entropy(logits[0].float().cpu(), ids[0, prefill:].cpu(), reduction="none"), kept)


def decode_speed(model: PreTrainedModel, cache: Cache, ids: Tensor, prefill: int) -> Speed:
    """Read ids[:prefill] at once and the rest token by token, with an empty cache.

    Raises:
        ValueError: no token to prefill, or none behind it.
    """
    import torch

    from kvcache.evals.generation import kv_bytes

    _check(ids, prefill)
    seconds = []
    with torch.no_grad():
        _forward(model, cache, ids[:, :prefill], last_only=True)
        held = kv_bytes(cache)
        for index in range(prefill, ids.shape[1]):
            _wait(model)
            start = time.perf_counter()
            _forward(model, cache, ids[:, index : index + 1], last_only=True)
            _wait(model)
            seconds.append(time.perf_counter() - start)
    return Speed(tuple(seconds), held)


def kept_tokens(cache: Cache) -> int:
    """Tokens that the fullest layer holds."""
    from kvcache.cache import EvictingCache

    return cache.stats().slots if isinstance(cache, EvictingCache) else cache.get_seq_length()


def _check(ids: Tensor, prefill: int) -> None:
    if ids.ndim != 2 or ids.shape[0] != 1 or not 0 < prefill < ids.shape[1]:
        raise ValueError(f"{prefill} tokens to prefill and some behind them cannot be had from ids {tuple(ids.shape)}")


def _forward(model: PreTrainedModel, cache: Cache, ids: Tensor, last_only: bool) -> Tensor:
    """Logits `[1, tokens, vocabulary]`, or of the last token only."""
    from kvcache.evals.generation import CACHE_ARGUMENT

    arguments: dict[str, Any] = {CACHE_ARGUMENT: cache, "use_cache": True, "logits_to_keep": int(last_only)}
    return model(input_ids=ids.to(model.device), **arguments).logits


def _wait(model: PreTrainedModel) -> None:
    import torch

    if model.device.type == "cuda":
        torch.cuda.synchronize()
