"""KV-cache eviction for Hugging Face transformers: a fixed number of slots, and the tokens that matter in them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.budget import Budget, LayerBudget, pyramid
    from kvcache.cache import EvictingCache, SinkH2OCache, StreamingLLMCache
    from kvcache.heads import AdaptiveHeads
    from kvcache.memory import estimate_bytes
    from kvcache.stats import LayerStats, Stats

__all__ = [
    "AdaptiveHeads",
    "Budget",
    "EvictingCache",
    "LayerBudget",
    "LayerStats",
    "SinkH2OCache",
    "Stats",
    "StreamingLLMCache",
    "estimate_bytes",
    "pyramid",
]

_HOMES = {
    "budget": ("Budget", "LayerBudget", "pyramid"),
    "cache": ("EvictingCache", "SinkH2OCache", "StreamingLLMCache"),
    "heads": ("AdaptiveHeads",),
    "memory": ("estimate_bytes",),
    "stats": ("LayerStats", "Stats"),
}


def __getattr__(name: str) -> Any:
    """Import on first use: torch and transformers take seconds, which `kvcache --help` need not wait for."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"kvcache.{module}"), name)
    raise AttributeError(f"module 'kvcache' has no attribute {name!r}; it has {', '.join(__all__)}")
