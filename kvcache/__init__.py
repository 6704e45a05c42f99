"""KV-cache eviction for Hugging Face transformers: a fixed number of slots, and the tokens that matter in them."""

from kvcache.budget import Budget, LayerBudget, pyramid
from kvcache.cache import EvictingCache, SinkH2OCache, StreamingLLMCache
from kvcache.memory import estimate_bytes
from kvcache.stats import LayerStats, Stats

__all__ = [
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
