"""What the tests share: transformers' renamed arguments, models, masks, and the comparisons with the oracle."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM, PreTrainedModel
from transformers.masking_utils import eager_mask

from kvcache.models import tiny

CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""transformers 5.24 renamed the argument; the old name still works there, with a deprecation warning."""
TOLERANCE = 1e-5
"""Largest difference of two logits (float64 models; their norms and RoPE run in float32)."""


# -- running models -------------------------------------------------------------------------------------------------


def call(model: PreTrainedModel, cache: Any, ids: Tensor, **arguments: Any) -> Any:
    """One forward with a cache, under the name this version of transformers gives the argument."""
    given = {name: value for name, value in arguments.items() if value is not None}
    return model(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache}, **given)


def generate(model: PreTrainedModel, cache: Any, ids: Tensor, new_tokens: int, **arguments: Any) -> Any:
    """Greedy unless told otherwise; no end token."""
    options = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": 0, **arguments}
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(input_ids=ids, **{CACHE_ARGUMENT: cache}, **options)  # pyright: ignore[reportCallIssue]


def model_of(architecture: str, **overrides: Any) -> PreTrainedModel:
    """A fresh small float64 model; sdpa where that is right, see `native_attention`."""
    options = {"dtype": torch.float64, "attn_implementation": native_attention(architecture), **overrides}
    return tiny.build(architecture, **options)


def native_attention(architecture: str) -> str:
    """The attention a small model runs with. sdpa knows no sink logits and no softcap, and Gemma 2's eager attention
    turns padding into NaN in float64: its mask is the lowest float64 and its softmax is float32."""
    return {"gemma2": "plain64", "gpt_oss": "eager"}.get(architecture, "sdpa")


def _plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if attention_mask is not None:
        logits = logits + attention_mask
    return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("plain64", _plain_attention)
AttentionMaskInterface.register("plain64", eager_mask)


@functools.cache
def shared_model(architecture: str) -> PreTrainedModel:
    """The same, built once per process: for tests that leave it as they found it."""
    return model_of(architecture)


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random ids [batch, length]; 0 is padding and 1 the first token's, neither occurs."""
    return torch.randint(2, tiny.VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(ids: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Row r keeps its last `lengths[r]` ids behind padding: (ids, mask)."""
    columns = torch.arange(ids.shape[1])
    mask = (columns[None] >= ids.shape[1] - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def right_padded(ids: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Row r keeps its first `lengths[r]` ids before padding: (ids, mask)."""
    mask = (torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


# -- comparing ------------------------------------------------------------------------------------------------------


def managed_layers(cache: Any) -> list[int]:
    """The layers that a budget manages, as the cache itself says."""
    return [layer.layer for layer in cache.stats().layers if getattr(layer, "managed", True)]


def kept(cache: Any, layer: int) -> list[list[list[int]]]:
    """`cache.kept_positions` as nested lists without the padding; the padding must come first, and is checked to."""
    rows = cache.kept_positions(layer).tolist()
    for row in rows:
        for head in row:
            assert head == sorted(head), f"kept_positions is not ascending: {head}"
    return [[[p for p in head if p >= 0] for head in row] for row in rows]


def scores(cache: Any, layer: int) -> list[list[list[float]]]:
    """`cache.scores` as nested lists, in the order of `kept`."""
    held = cache.kept_positions(layer) >= 0
    values = cache.scores(layer)
    assert values.shape == held.shape and values.dtype == torch.float32
    rows, heads = held.shape[:2]
    return [[values[row, head][held[row, head]].tolist() for head in range(heads)] for row in range(rows)]


def assert_close(actual: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    difference = (actual.double() - expected.double()).abs()
    assert bool(difference.isfinite().all()), f"{what}: not finite"
    worst = float(difference.max()) if difference.numel() else 0.0
    assert worst <= tolerance, f"{what}: differs by {worst:.2e}, allowed {tolerance:.0e}"


def assert_same_kept(cache: Any, oracle: Any, what: str, scored: bool = True) -> None:
    """Every managed layer holds the positions that the oracle holds, with the same scores."""
    assert managed_layers(cache) == sorted(oracle.layers), f"{what}: managed layers"
    for layer in oracle.layers:
        actual, expected = kept(cache, layer), oracle.kept(layer)
        assert len(actual) == len(expected), f"{what}: batch of layer {layer}"
        for row, (heads, expected_heads) in enumerate(zip(actual, expected, strict=True)):
            for head, (mine, theirs) in enumerate(zip(heads, expected_heads, strict=True)):
                where = f"{what}: layer {layer}, row {row}, head {head}"
                lost, extra = sorted(set(theirs) - set(mine)), sorted(set(mine) - set(theirs))
                hint = f"missing {lost}, unexpected {extra}, of {len(theirs)}; closest choice {oracle.closest:.1e}"
                assert mine == theirs, f"{where}: {hint}"
        if scored:
            _assert_same_scores(scores(cache, layer), oracle.scores(layer), f"{what}: layer {layer}")


def _assert_same_scores(actual: list[Any], expected: list[Any], what: str) -> None:
    for row, (heads, expected_heads) in enumerate(zip(actual, expected, strict=True)):
        for head, (mine, theirs) in enumerate(zip(heads, expected_heads, strict=True)):
            a, e = torch.tensor(mine, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
            assert_close(a / e.clamp(min=1.0), e / e.clamp(min=1.0), f"{what}, row {row}, head {head}: scores", 2e-5)


class Pair:
    """The engine and the oracle, side by side: every `step` feeds both and compares logits and what is held."""

    def __init__(self, model: PreTrainedModel, cache: Any, oracle: Any, scored: bool = True) -> None:
        self.model, self.cache, self.oracle, self.scored = model, cache, oracle, scored
        self.mask: Tensor | None = None
        self.steps = 0

    def step(self, ids: Tensor, mask: Tensor | None = None, what: str = "") -> Tensor:
        """Feeds `ids` [batch, n] whose mask is `mask` [batch, n] (None: all real); returns the engine's logits."""
        new = torch.ones_like(ids) if mask is None else mask
        self.mask = new if self.mask is None else torch.cat([self.mask, new], dim=-1)
        n = ids.shape[1]
        position_ids = (self.mask.cumsum(-1) - 1).masked_fill(self.mask == 0, 0)[:, -n:]
        arguments = {"attention_mask": self.mask, "position_ids": position_ids}
        expected = self.oracle.forward(ids, **arguments)
        with torch.no_grad():
            actual = call(self.model, self.cache, ids, **arguments).logits
        self.steps += 1
        where = f"{what} step {self.steps} (n={n}, seen={self.mask.shape[1]})"
        real = new.bool()
        assert_close(actual[real], expected[real], f"{where}: logits")
        assert_same_kept(self.cache, self.oracle, where, self.scored)
        assert self.cache.get_seq_length() == self.mask.shape[1], where
        return actual

    def rows(self, rows: Tensor) -> None:
        """Follows a row operation that the caller did to the cache: row i is now what row `rows[i]` was."""
        self.oracle.reorder(rows)
        if self.mask is not None:
            self.mask = self.mask[rows]
        assert_same_kept(self.cache, self.oracle, "after a row operation", self.scored)


def tensors_of(thing: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor reachable from an object through attributes and containers, each once; configs are not followed."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, str | bytes | int | float | bool | type(None) | type):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        for name, value in getattr(thing, "__dict__", {}).items():
            if name != "grad_fn":
                yield from tensors_of(value, seen)
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_of(value, seen)
    elif isinstance(thing, list | tuple | set | frozenset):
        for value in thing:
            yield from tensors_of(value, seen)
    elif hasattr(thing, "__dict__") and not _is_foreign(thing):
        for value in vars(thing).values():
            yield from tensors_of(value, seen)
        for cls in type(thing).__mro__:
            for name in getattr(cls, "__slots__", ()):
                if isinstance(name, str) and hasattr(thing, name):
                    yield from tensors_of(getattr(thing, name), seen)


def _is_foreign(thing: Any) -> bool:
    """Models, configs, functions and modules are not part of a cache's state."""
    import types

    from transformers import PretrainedConfig

    kinds = torch.nn.Module | PretrainedConfig | types.FunctionType | types.MethodType | types.ModuleType
    return isinstance(thing, kinds)


def storage_bytes(thing: Any) -> int:
    """Bytes of the distinct storages behind `tensors_of`."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(thing)}
    return sum(storages.values())
