"""Caches as people write them on a command line: `full`, `sink_h2o:slots=25%`, `streaming_llm:sinks=4,window=508`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import Cache, DynamicCache, PreTrainedConfig, QuantizedCache

from kvcache.budget import DEFAULT_MARGIN, Budget
from kvcache.cache import EvictingCache, SinkH2OCache, StreamingLLMCache
from kvcache.heads import AdaptiveHeads
from kvcache.policies import (
    RKV,
    TOVA,
    Everything,
    ExpectedAttention,
    HeavyHitters,
    Joined,
    KeyDiff,
    KeyNorm,
    LagKV,
    Last,
    Policy,
    Pool,
    Random,
    Scissorhands,
    SnapKV,
    TriAttention,
    ValueAware,
)

Value = int | float | str
Factory = Callable[..., Cache]
"""Called as `factory(config, **options)`; its keyword-only parameters are the options that the cache has."""

REGISTRY: dict[str, Factory] = {}
PARTS = ("sinks", "window", "heavy_hitters")
SINKS = 4


@dataclass(frozen=True)
class CacheSpec:
    """A cache that was asked for. options: as they were written, in their order. `str` gives the written form back."""

    name: str
    options: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        written = ",".join(f"{name}={value}" for name, value in self.options)
        return f"{self.name}:{written}" if written else self.name

    @property
    def label(self) -> str:
        """Short, for tables and charts: sizes without their names, `sink_h2o 4+252+256 margin=1`."""
        given = dict(self.options)
        sizes = "+".join(str(given.pop(name)) for name in ("slots", *PARTS) if name in given)
        rest = (f"{name}={value}" for name, value in given.items())
        return " ".join(part for part in (self.name, sizes, *rest) if part)

    def get(self, name: str, default: Value) -> Value:
        """An option's value, or the default where it was not given."""
        return dict(self.options).get(name, default)


def register(name: str, factory: Factory) -> None:
    """Make a cache known by a name: `factory(config, *, option=default, ...)` builds it.

    A factory with some of the options sinks, window and heavy_hitters understands `slots=` as well.
    """
    REGISTRY[name] = factory


def parse_cache(text: str) -> CacheSpec:
    """`name` or `name:option=value,option=value`.

    Raises:
        ValueError: an unknown cache or option (those that exist are listed), an option without a value, twice, or with
            a share of the length that is none.
    """
    name, _, rest = text.strip().partition(":")
    if name not in REGISTRY:
        raise ValueError(f"unknown cache {name!r}: there are {', '.join(REGISTRY)}")
    options: dict[str, Value] = {}
    for part in rest.split(",") if rest else ():
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ValueError(f"{part!r} in {text!r} is not OPTION=VALUE; {_known(name)}")
        if option not in _options(name):
            raise ValueError(f"unknown option {option!r} in {text!r}; {_known(name)}")
        if option in options:
            raise ValueError(f"the option {option!r} stands twice in {text!r}")
        options[option] = _value(value)
        if option == "slots":
            _check_slots(options[option])
    return CacheSpec(name, tuple(options.items()))


def build_cache(spec: CacheSpec, config: PreTrainedConfig, length: int | None = None) -> Cache:
    """An empty cache. length: tokens of which a share, `slots=25%`, is taken.

    Raises:
        ValueError: a share without a length, or what the cache itself refuses.
    """
    options = resolve_options(spec, length)
    try:
        return REGISTRY[spec.name](config, **options)
    except (TypeError, ImportError) as error:  # a number where a word is wanted, or a package that is missing
        raise ValueError(f"the cache {str(spec)!r} cannot be made: {error}") from error


def resolve_options(spec: CacheSpec, length: int | None = None) -> dict[str, Any]:
    """The options as the cache's factory takes them: `slots=` is divided into the parts that the cache has.

    Raises:
        ValueError: a share of the length without a length, or slots that cannot be divided.
    """
    options: dict[str, Any] = dict(spec.options)
    if "slots" not in options:
        return options
    slots = _resolved(options.pop("slots"), length)
    given = {name: options.pop(name) for name in PARTS if name in options}
    return options | split_slots(slots, spec.name, **given)


def split_slots(slots: int, name: str, **given: int) -> dict[str, int]:
    """How `slots=N` is divided over the parts of the budget that the cache has, as options of its factory.

    With heavy hitters: 4 sinks, a window up to half of the slots, and heavy hitters in the rest. Without: the window
    takes the rest. Parts that are given stay as they are.

    Raises:
        ValueError: fewer slots than the parts need.
    """
    has = _parameters(name)
    sinks = given.get("sinks", min(SINKS, max(0, slots - 1)) if "sinks" in has else 0)
    heavy = given.get("heavy_hitters")
    if "heavy_hitters" not in has:
        window = given.get("window", slots - sinks)
    elif heavy is None:
        window = given.get("window", max(1, slots // 2 - sinks))
    else:
        window = given.get("window", slots - sinks - heavy)
    rest = slots - sinks - window
    parts = {"sinks": sinks, "window": window, "heavy_hitters": rest if heavy is None else heavy}
    if rest < 0 or window < 1 or sum(parts.values()) != slots:
        raise ValueError(f"slots={slots} of {name} cannot be divided into {_written(parts)}: take others, or no slots=")
    return {part: value for part, value in parts.items() if part in has}


def _written(parts: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in parts.items())


def _resolved(slots: Value, length: int | None) -> int:
    if isinstance(slots, int):
        return slots
    if length is None:
        raise ValueError(f"slots={slots} is a share of a length, and none is known here: give a number of slots")
    return max(1, round(length * float(str(slots).rstrip("%")) / 100))


def _check_slots(slots: Value) -> None:
    share = _value(slots[:-1]) if isinstance(slots, str) and slots.endswith("%") else None
    if isinstance(share, int | float) and 0 < share <= 100:
        return
    if not isinstance(slots, int) or slots < 1:
        raise ValueError(f"slots={slots} is neither a number of slots from 1 on nor a share above 0% up to 100%")


def _value(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _parameters(name: str) -> tuple[str, ...]:
    parameters = inspect.signature(REGISTRY[name]).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


def _options(name: str) -> tuple[str, ...]:
    own = _parameters(name)
    return ("slots", *own) if "window" in own else own


def _known(name: str) -> str:
    return f"{name} has the options {', '.join(_options(name))}" if _options(name) else f"{name} has no options"


# ---- the caches


def _full(config: PreTrainedConfig) -> Cache:
    return DynamicCache(config=config)


def _window(
    config: PreTrainedConfig, *, window: int = 1024, margin: int = DEFAULT_MARGIN, positions: Any = "auto"
) -> Cache:
    return StreamingLLMCache(config, sinks=0, window=window, margin=margin, positions=positions)


def _streaming_llm(
    config: PreTrainedConfig,
    *,
    sinks: int = SINKS,
    window: int = 1020,
    margin: int = DEFAULT_MARGIN,
    positions: Any = "cache",
) -> Cache:
    return StreamingLLMCache(config, sinks, window, margin, positions)


def _sink_h2o(
    config: PreTrainedConfig,
    *,
    sinks: int = SINKS,
    window: int = 508,
    heavy_hitters: int = 512,
    margin: int = DEFAULT_MARGIN,
    positions: Any = "auto",
) -> Cache:
    return SinkH2OCache(config, sinks, window, heavy_hitters, margin, positions)


def _heads(floor: float) -> AdaptiveHeads | None:
    """`head_floor=0.2`: Ada-KV's division among heads; 1: all heads alike."""
    return None if floor == 1 else AdaptiveHeads(floor)


def _heavy_hitters(
    config: PreTrainedConfig,
    *,
    decay: float = 1.0,
    queries: int = 0,
    pool: int = 1,
    normalised: int = 0,
    head_floor: float = 1.0,
    sinks: int = SINKS,
    window: int = 508,
    heavy_hitters: int = 512,
    margin: int = DEFAULT_MARGIN,
    positions: Any = "auto",
) -> Cache:
    """SinkH2OCache with the policy's options: of the last `queries` queries (0: of all), pooled over `pool` tokens."""
    observed = Last(queries) if queries else Everything(decay)
    policy = HeavyHitters(observed, Pool(pool) if pool > 1 else None, bool(normalised))
    return EvictingCache(config, policy, Budget(sinks, window, heavy_hitters, margin), positions, _heads(head_floor))


def _snapkv(
    config: PreTrainedConfig,
    *,
    queries: int = 8,
    pool: int = 15,
    head_floor: float = 1.0,
    sinks: int = SINKS,
    window: int = 508,
    heavy_hitters: int = 512,
    margin: int = DEFAULT_MARGIN,
    positions: Any = "auto",
) -> Cache:
    policy = SnapKV(Last(queries), Pool(pool) if pool > 1 else None)
    return EvictingCache(config, policy, Budget(sinks, window, heavy_hitters, margin), positions, _heads(head_floor))


def _joined(
    config: PreTrainedConfig,
    *,
    queries: int = 8,
    pool: int = 31,
    share: float = 0.5,
    ahead: str = "tri_attention",
    sinks: int = SINKS,
    window: int = 508,
    heavy_hitters: int = 512,
    margin: int = DEFAULT_MARGIN,
    positions: Any = "auto",
) -> Cache:
    """What the last queries look at, and what a prediction (`ahead`: tri_attention, expected_attention) wants."""
    predictions: dict[str, Policy] = {"tri_attention": TriAttention(), "expected_attention": ExpectedAttention()}
    if ahead not in predictions:
        raise ValueError(f"ahead={ahead!r} must be one of {', '.join(predictions)}")
    policy = Joined(SnapKV(Last(queries), Pool(pool) if pool > 1 else None), predictions[ahead], share)
    return EvictingCache(config, policy, Budget(sinks, window, heavy_hitters, margin), positions)


def _scissorhands(
    config: PreTrainedConfig,
    *,
    queries: int = 400,
    sinks: int = SINKS,
    window: int = 508,
    heavy_hitters: int = 512,
    margin: int = DEFAULT_MARGIN,
    positions: Any = "auto",
) -> Cache:
    policy = Scissorhands(Last(queries))
    return EvictingCache(config, policy, Budget(sinks, window, heavy_hitters, margin), positions)


def _lag_kv(
    config: PreTrainedConfig,
    *,
    lag: int = 128,
    sinks: int = SINKS,
    window: int = 508,
    heavy_hitters: int = 512,
    margin: int = DEFAULT_MARGIN,
    positions: Any = "auto",
) -> Cache:
    policy = LagKV(lag)
    return EvictingCache(config, policy, Budget(sinks, window, heavy_hitters, margin), positions)


def _r_kv(
    config: PreTrainedConfig,
    *,
    queries: int = 8,
    pool: int = 7,
    weight: float = 0.1,
    threshold: float = 0.5,
    latest: int = 1,
    sinks: int = SINKS,
    window: int = 508,
    heavy_hitters: int = 512,
    margin: int = DEFAULT_MARGIN,
    positions: Any = "auto",
) -> Cache:
    observed, pooled = Last(queries), Pool(pool, "max") if pool > 1 else None
    policy = RKV(observed, pooled, weight, threshold, latest)
    return EvictingCache(config, policy, Budget(sinks, window, heavy_hitters, margin), positions)


def _value_aware(
    config: PreTrainedConfig,
    *,
    queries: int = 0,
    pool: int = 1,
    sinks: int = SINKS,
    window: int = 508,
    heavy_hitters: int = 512,
    margin: int = DEFAULT_MARGIN,
    positions: Any = "auto",
) -> Cache:
    """Mass of the last `queries` queries (0: of all), pooled over `pool` tokens, times the norm of the value."""
    observed = Last(queries) if queries else Everything()
    policy = ValueAware(HeavyHitters(observed, Pool(pool) if pool > 1 else None))
    return EvictingCache(config, policy, Budget(sinks, window, heavy_hitters, margin), positions)


def _of(policy: Policy) -> Factory:
    """A cache with a policy that has no options."""

    def factory(
        config: PreTrainedConfig,
        *,
        sinks: int = SINKS,
        window: int = 508,
        heavy_hitters: int = 512,
        margin: int = DEFAULT_MARGIN,
        positions: Any = "auto",
    ) -> Cache:
        return EvictingCache(config, policy, Budget(sinks, window, heavy_hitters, margin), positions)

    return factory


def _quantized(
    config: PreTrainedConfig,
    *,
    backend: str = "quanto",
    nbits: int | None = None,
    q_group_size: int | None = None,
    residual_length: int | None = None,
) -> Cache:
    """transformers' own; what is not given is left to its defaults, some backends refuse it."""
    options = {"nbits": nbits, "q_group_size": q_group_size, "residual_length": residual_length}
    return QuantizedCache(backend, config, **{name: value for name, value in options.items() if value is not None})


def _recompute(config: PreTrainedConfig, *, window: int = 1024, stride: int = 16) -> Cache:
    raise ValueError("recompute keeps no cache, it computes every window anew: it is for kvcache eval ppl only")


for _name, _factory in {
    "full": _full,
    "window": _window,
    "streaming_llm": _streaming_llm,
    "sink_h2o": _sink_h2o,
    "heavy_hitters": _heavy_hitters,
    "snapkv": _snapkv,
    "tri_attention": _of(TriAttention()),
    "expected_attention": _of(ExpectedAttention()),
    "joined": _joined,
    "scissorhands": _scissorhands,
    "lag_kv": _lag_kv,
    "r_kv": _r_kv,
    "value_aware": _value_aware,
    "tova": _of(TOVA()),
    "key_norm": _of(KeyNorm()),
    "key_diff": _of(KeyDiff()),
    "random": _of(Random()),
    "quantized": _quantized,
    "recompute": _recompute,
}.items():
    register(_name, _factory)
