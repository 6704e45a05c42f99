"""Policies: which tokens stay. One file each; `base.py` says what a policy is."""

from kvcache.policies.base import Policy, Queries, Slots
from kvcache.policies.expected_attention import ExpectedAttention
from kvcache.policies.heavy_hitters import HeavyHitters
from kvcache.policies.joined import Joined
from kvcache.policies.key_diff import KeyDiff
from kvcache.policies.key_norm import KeyNorm
from kvcache.policies.lag_kv import LagKV
from kvcache.policies.observation import Everything, Last, Observation, Votes
from kvcache.policies.pooling import Pool
from kvcache.policies.query_statistics import QueryStatistics
from kvcache.policies.random import Random
from kvcache.policies.recency import Recency
from kvcache.policies.rkv import RKV
from kvcache.policies.scissorhands import Scissorhands
from kvcache.policies.snapkv import SnapKV
from kvcache.policies.tova import TOVA
from kvcache.policies.tri_attention import TriAttention
from kvcache.policies.value_aware import ValueAware

__all__ = [
    "RKV",
    "TOVA",
    "Everything",
    "ExpectedAttention",
    "HeavyHitters",
    "Joined",
    "KeyDiff",
    "KeyNorm",
    "LagKV",
    "Last",
    "Observation",
    "Policy",
    "Pool",
    "Queries",
    "QueryStatistics",
    "Random",
    "Recency",
    "Scissorhands",
    "Slots",
    "SnapKV",
    "TriAttention",
    "ValueAware",
    "Votes",
]
