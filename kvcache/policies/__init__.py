"""Policies: which tokens stay. One file each; `base.py` says what a policy is."""

from kvcache.policies.base import Policy, Queries, Slots
from kvcache.policies.heavy_hitters import HeavyHitters
from kvcache.policies.observation import Everything, Last, Observation, Votes
from kvcache.policies.pooling import Pool
from kvcache.policies.recency import Recency

__all__ = [
    "Everything",
    "HeavyHitters",
    "Last",
    "Observation",
    "Policy",
    "Pool",
    "Queries",
    "Recency",
    "Slots",
    "Votes",
]
