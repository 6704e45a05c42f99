"""What a context's tokens are worth for any question: the attention they get while the model repeats the context."""

import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcache.cache import EvictingCache
from kvcache.errors import StateError
from kvcache.policies import Last, Policy, Slots, Votes
from kvcache.routing import CACHE_ARGUMENT

LEAD = 8  # tokens before a chunk that tell the model where to go on, as in the authors' code


def score_by_reconstruction(
    model: PreTrainedModel, cache: EvictingCache, ids: Tensor, instruction: Tensor, chunk: int = 2048
) -> None:
    """Make each slot's score the attention mass it gets while the model reads its context again, chunk by chunk.

    For a context that many unknown questions will be asked about: read it into a cache that holds all of it, call this,
    and let the cache evict by a policy that ranks by the score, such as `HeavyHitters()`. Each chunk is read after the
    instruction and the `LEAD` tokens before it, by a copy of the cache, so that memory for a second cache is needed;
    the cache itself keeps its tokens, and time is about that of two prefills.

    Source: KVzip, Kim et al., arXiv 2505.23416, section 3. What differs: the mass is summed over the queries of all
    repetitions and over the group's query heads, where the paper takes the maximum over those of a slot's own chunk,
    and probabilities are those of the whole attention, not of a softmax over that chunk.

    Args:
        model: whose config the cache was made from.
        cache: holds the whole of `ids`, without padding, and no more.
        ids: `[batch, n]` int, the tokens that the cache has read.
        instruction: `[m]` int, tokens such as those of "Repeat the previous context:", in the model's chat format.
        chunk: tokens that are repeated at a time.

    Raises:
        StateError: the cache has seen other tokens than `ids`, has evicted some, or holds padding or no free slot.
        ValueError: a chunk below 1, or an instruction that is not one row of ids.
    """
    if chunk < 1 or instruction.ndim != 1:
        raise ValueError(f"chunk={chunk} must be at least 1, and instruction {tuple(instruction.shape)} one row of ids")
    _check(cache, ids)
    totals = [torch.zeros_like(layer.score[:, :, : layer.length]) for layer in cache.managed]
    for start in range(0, ids.shape[1], chunk):
        part = ids[:, start : start + chunk]
        lead = ids[:, max(0, start - LEAD) : start]
        text = torch.cat((instruction.to(ids).expand(len(ids), -1), lead, part), dim=1)
        for total, mass in zip(totals, _mass(model, cache, text, part.shape[1]), strict=True):
            total += mass[:, :, : total.shape[-1]]
    for layer, total in zip(cache.managed, totals, strict=True):
        layer.score[:, :, : layer.length] = total


@dataclass(frozen=True)
class _Witness(Policy):
    """Takes down the mass of one forward's last queries; it comes before anything is evicted."""

    observed: Last
    mass: list[Tensor] = field(default_factory=list)

    observes_mass: ClassVar[bool] = True

    def votes(self, n: int) -> Votes:
        return self.observed.votes(n)

    def observe(self, score: Tensor, mass: Tensor) -> None:
        self.mass.append(mass)

    def priority(self, slots: Slots) -> Tensor:
        return slots.positions


def _mass(model: PreTrainedModel, cache: EvictingCache, text: Tensor, queries: int) -> list[Tensor]:
    """Per managed layer `[batch, kv_heads, held + ...]`: mass of the last queries of `text`, the held slots first."""
    reader = copy.deepcopy(cache)
    witnesses = []
    for layer in reader.managed:
        layer.policy = _Witness(Last(queries))
        witnesses.append(layer.policy)
    arguments: dict[str, Any] = {CACHE_ARGUMENT: reader, "use_cache": True, "logits_to_keep": 1}
    with torch.no_grad():
        model(input_ids=text, **arguments)
    return [witness.mass[0] for witness in witnesses]


def _check(cache: EvictingCache, ids: Tensor) -> None:
    for layer in cache.managed:
        if ids.shape != (layer.batch_size if layer.is_initialized else 0, layer.seen):
            raise StateError(f"ids of shape {tuple(ids.shape)} are not the {layer.seen} tokens that {layer!r} has seen")
        if layer.length < layer.seen or any(layer.padding):
            raise StateError(f"{layer!r} does not hold all its tokens, or holds padding: give it more slots, no mask")
        if layer.is_full:
            raise StateError(f"{layer!r} has no free slot and would evict before it reads: give it a larger budget")
