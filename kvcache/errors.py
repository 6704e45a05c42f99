"""Every error that wrong input can raise. All are `ValueError`s that name what was given and the way out."""

from kvcache.models.spec import UnsupportedModelError


class BudgetError(ValueError):
    """A budget, margin or schedule that cannot be."""


class NotRoutedError(ValueError):
    """The model's attention did not reach the cache: another config, another attention, or an interrupted forward."""


class StateError(ValueError):
    """An operation that does not fit what the cache holds: another batch, dtype or device, a crop, NaN keys."""


class CacheMemoryError(ValueError):
    """Not enough memory for the slots; the message says how many bytes and what budget would fit."""


__all__ = ["BudgetError", "CacheMemoryError", "NotRoutedError", "StateError", "UnsupportedModelError"]
