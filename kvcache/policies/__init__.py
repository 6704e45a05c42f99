"""Policies: which tokens stay. One file each; `base.py` says what a policy is."""

from kvcache.policies.base import Policy, Slots
from kvcache.policies.heavy_hitters import HeavyHitters
from kvcache.policies.recency import Recency

__all__ = ["HeavyHitters", "Policy", "Recency", "Slots"]
