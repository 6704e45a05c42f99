"""kvcache/budget.py: what a budget accepts, what it says of each layer, and the pyramid schedule."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvcache import Budget, LayerBudget, pyramid
from kvcache.budget import DEFAULT_MARGIN
from kvcache.errors import BudgetError

pytestmark = pytest.mark.fast
LEAST = {"sinks": 0, "window": 1, "heavy_hitters": 0, "margin": 1}


def test_defaults() -> None:
    assert Budget().layer(0, 12) == LayerBudget(4, 508, 512, DEFAULT_MARGIN)
    assert DEFAULT_MARGIN >= 1


def test_slots_and_capacity() -> None:
    layer = LayerBudget(sinks=2, window=30, heavy_hitters=400, margin=5)
    assert (layer.slots, layer.capacity) == (432, 437)


@pytest.mark.parametrize("name", LEAST)
def test_least_numbers(name: str) -> None:
    assert getattr(Budget(**{name: LEAST[name]}).layer(0, 1), name) == LEAST[name]
    least = Budget(**LEAST).layer(0, 1)
    assert (least.slots, least.capacity) == (1, 2)
    for wrong in (LEAST[name] - 1, -100):
        with pytest.raises(BudgetError, match=rf"{name}={wrong} .*{LEAST[name]} or more"):
            Budget(**{name: wrong})


NO_NUMBERS = (2.0, 0.5, True, False, None, "8", torch.tensor(4), {4}, 3j, float("inf"), float("nan"))


@pytest.mark.parametrize("wrong", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize("name", LEAST)
def test_what_is_no_whole_number(name: str, wrong: Any) -> None:
    """Alone and in a list; the message names the part and the value."""
    for value in (wrong, [8, wrong, 8]):
        with pytest.raises(BudgetError, match=name) as caught:
            Budget(**{name: value})
        assert str(wrong) in str(caught.value)


@pytest.mark.parametrize("name", LEAST)
def test_a_wrong_number_in_a_list(name: str) -> None:
    with pytest.raises(BudgetError, match=rf"{name}=-3 .*{LEAST[name]} or more"):
        Budget(**{name: [8, 8, -3]})


def test_parts_by_layer() -> None:
    budget = Budget(sinks=1, window=[5, 6, 7], heavy_hitters=range(3), margin=(4, 3, 2))
    assert [budget.layer(index, 3) for index in range(3)] == [
        LayerBudget(1, 5, 0, 4),
        LayerBudget(1, 6, 1, 3),
        LayerBudget(1, 7, 2, 2),
    ]


@pytest.mark.parametrize("name", LEAST)
@pytest.mark.parametrize("given", [1, 2, 4, 12])
def test_a_list_of_another_length_than_the_model(name: str, given: int) -> None:
    budget = Budget(**{name: [3] * given})
    with pytest.raises(BudgetError, match=rf"{name} lists {given} numbers but the model has 3 layers"):
        budget.layer(0, 3)
    assert getattr(budget.layer(given - 1, given), name) == 3


def test_an_empty_list_is_no_budget() -> None:
    with pytest.raises(BudgetError, match=r"window.* 0 .*3 layers"):
        Budget(window=[]).layer(0, 3)


def test_a_budget_is_a_value() -> None:
    """Hashable, comparable, and a list that changes later does not change it."""
    window = [5, 6]
    budget = Budget(window=window)
    window[0] = 99
    assert budget.layer(0, 2).window == 5
    assert budget == Budget(window=(5, 6))
    assert hash(budget) == hash(Budget(window=[5, 6]))
    assert budget != Budget(window=[5, 7])
    with pytest.raises(dataclasses.FrozenInstanceError):
        budget.sinks = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert dataclasses.replace(budget, margin=7).layer(1, 2) == LayerBudget(4, 6, 512, 7)
    with pytest.raises(BudgetError, match="margin=0"):
        dataclasses.replace(budget, margin=0)


# -- pyramid -----------------------------------------------------------------------------------------------------------


def slots_of(budget: Budget, layers: int) -> list[int]:
    return [budget.layer(index, layers).slots for index in range(layers)]


def assert_pyramid(slots: Sequence[int], mean: int, least: int) -> None:
    assert abs(sum(slots) / len(slots) - mean) <= 0.5, f"on average {sum(slots) / len(slots)} and not {mean}: {slots}"
    assert list(slots) == sorted(slots, reverse=True)
    assert min(slots) >= least


def test_pyramid_by_hand() -> None:
    """20 slots in the last layer, as much above 100 in the first, the same step between."""
    budget = pyramid(5, 100, sinks=2, window=8, margin=3, beta=5.0)
    assert slots_of(budget, 5) == [180, 140, 100, 60, 20]
    assert [budget.layer(index, 5) for index in (0, 4)] == [LayerBudget(2, 8, 170, 3), LayerBudget(2, 8, 10, 3)]


@pytest.mark.parametrize("seed", range(20))
def test_pyramids_where_every_layer_has_room(seed: int) -> None:
    chance = random.Random(seed)
    layers, sinks, window = chance.randint(2, 80), chance.randint(0, 8), chance.randint(1, 64)
    beta = chance.choice([1, 1.5, 2.0, 20.0, 100.0])
    mean = int((sinks + window + 1) * beta) + chance.randint(1, 500)  # the last layer's share holds sinks and window
    budget = pyramid(layers, mean, sinks=sinks, window=window, beta=beta)
    slots = slots_of(budget, layers)
    assert_pyramid(slots, mean, sinks + window)
    assert abs(slots[-1] - mean / beta) <= 1
    steps = [one - other for one, other in itertools.pairwise(slots)]
    assert max(steps) - min(steps) <= 1, "it falls linearly"
    for index in range(layers):
        layer = budget.layer(index, layers)
        assert (layer.sinks, layer.window, layer.margin) == (sinks, window, DEFAULT_MARGIN)


@pytest.mark.parametrize(("layers", "mean"), [(32, 64), (32, 128), (2, 64), (3, 40), (28, 37)])
def test_pyramids_whose_top_needs_more_than_its_share(layers: int, mean: int) -> None:
    """Sinks and window take more than the last layer's share: the mean is kept all the same."""
    assert_pyramid(slots_of(pyramid(layers, mean), layers), mean, 36)


def test_a_pyramid_of_one_layer() -> None:
    assert slots_of(pyramid(1, 64), 1) == [64]


@pytest.mark.parametrize("layers", [1, 2, 7])
def test_the_flattest_pyramid(layers: int) -> None:
    assert slots_of(pyramid(layers, 50, beta=1), layers) == [50] * layers


@pytest.mark.parametrize("slots", [36, 35, 0, -4])
def test_too_few_slots_for_a_pyramid(slots: int) -> None:
    with pytest.raises(BudgetError, match=rf"slots={slots} .*36"):
        pyramid(4, slots)
    assert min(slots_of(pyramid(4, 37), 4)) >= 36


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "layers=0 .*1 or more"),
        ({"layers": -2}, "layers=-2"),
        ({"beta": 0.5}, r"beta=0\.5 .*1 or more"),
        ({"beta": 0}, "beta=0"),
        ({"beta": -20.0}, r"beta=-20\.0"),
        ({"sinks": -1}, "sinks=-1"),
        ({"window": 0}, "window=0"),
        ({"margin": 0}, "margin=0"),
        ({"margin": 1.5}, r"margin=1\.5"),
    ],
)
def test_pyramids_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        pyramid(**{"layers": 4, "slots": 100, **options})
