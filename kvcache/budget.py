"""How many slots a layer keeps, and of what kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcache.errors import BudgetError

DEFAULT_MARGIN = 32  # see docs/margin.md for the measurement


class LayerBudget(NamedTuple):
    """One layer's budget, in slots per KV head."""

    sinks: int
    window: int
    heavy_hitters: int
    margin: int

    @property
    def slots(self) -> int:
        """Slots kept by an eviction."""
        return self.sinks + self.window + self.heavy_hitters

    @property
    def capacity(self) -> int:
        """Slots allocated: those kept and the margin that fills up before the next eviction."""
        return self.slots + self.margin


@dataclass(frozen=True)
class Budget:
    """Slots per layer and KV head. Each part is one number, or a sequence with one number per layer of the model.

    Args:
        sinks: first tokens that always stay (StreamingLLM, arXiv 2309.17453), at least 0.
        window: last tokens that always stay, at least 1.
        heavy_hitters: further slots for the tokens that the policy ranks highest (H2O, arXiv 2306.14048), at least 0.
        margin: further slots that fill up before the next eviction, at least 1.

    Raises:
        BudgetError: a value that is not a whole number in these ranges, or sequences of unequal length.
    """

    sinks: int | Sequence[int] = 4
    window: int | Sequence[int] = 508
    heavy_hitters: int | Sequence[int] = 512
    margin: int | Sequence[int] = DEFAULT_MARGIN

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("window", 1), ("heavy_hitters", 0), ("margin", 1)):
            value = getattr(self, name)
            for number in value if isinstance(value, Sequence) else (value,):
                _check_number(name, number, least)
            if isinstance(value, Sequence):
                object.__setattr__(self, name, tuple(value))

    def layer(self, index: int, layers: int) -> LayerBudget:
        """The budget of layer `index` in a model of `layers` layers.

        Raises:
            BudgetError: a sequence in this budget has another length than `layers`.
        """
        return LayerBudget(*(self._part(name, index, layers) for name in LayerBudget._fields))

    def _part(self, name: str, index: int, layers: int) -> int:
        value = getattr(self, name)
        if isinstance(value, int):
            return value
        if len(value) != layers:
            raise BudgetError(
                f"{name} lists {len(value)} numbers but the model has {layers} layers: give one number for all layers "
                f"or a list of {layers}"
            )
        return value[index]


def _check_number(name: str, number: object, least: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise BudgetError(f"{name}={number!r} must be a whole number of slots, {least} or more")
    if number < least:
        raise BudgetError(f"{name}={number} must be {least} or more")


def pyramid(
    layers: int,
    slots: int,
    *,
    sinks: int = 4,
    window: int = 32,
    margin: int = DEFAULT_MARGIN,
    beta: float = 20.0,
) -> Budget:
    """PyramidKV's schedule: many slots in the lowest layer, falling linearly, on average `slots` per layer.

    The last layer keeps `slots / beta` (at least sinks and window, which are the same everywhere) and the first as much
    more than the average as the last has less (arXiv 2406.02069, section 4.2); heavy hitters take up the rest.

    Args:
        layers: layers of the model.
        slots: slots kept per layer on average, sinks and window included.
        beta: steepness, at least 1; 1 gives every layer the same.

    Raises:
        BudgetError: fewer slots than sinks and window need, fewer than 1 layer, or beta below 1.
    """
    if layers < 1:
        raise BudgetError(f"layers={layers} must be 1 or more")
    if beta < 1:
        raise BudgetError(f"beta={beta} must be 1 or more")
    if sinks + window >= slots:
        raise BudgetError(f"slots={slots} must be more than sinks + window = {sinks + window}")
    last = max(slots / beta, sinks + window) if layers > 1 else slots
    first = 2 * slots - last
    step = (first - last) / max(1, layers - 1)
    heavy = [round(first - step * index) - sinks - window for index in range(layers)]
    return Budget(sinks=sinks, window=window, heavy_hitters=heavy, margin=margin)
