"""evals/haystack.py and evals/needle.py: prompts to the token, grades, and the command on tiny models and the real one."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedTokenizerFast

from kvcache.evals import needle as needle_eval
from kvcache.evals.haystack import (
    KINDS,
    Builder,
    Form,
    Haystack,
    Needle,
    draw_needles,
    form,
    grade,
    passage,
    sentences,
)
from tests.test_cli import TEMPLATE, _tokenizer

SUBJECTS = ("Anne", "A miller", "The clerk", "Old Dr. Smith", "Nobody", "Mrs. Hill", "Every soldier")
VERBS = ("crossed", "painted", "sold", "forgot", "admired", "measured and then carefully described", "left")
OBJECTS = ("the bridge.", "a small house!", "his own garden.", "it?", "the letters of the bishop.", "two horses.")
CHANCE = random.Random(0)
TEXT = "\n".join(
    " ".join(map(CHANCE.choice, (SUBJECTS, VERBS, OBJECTS))) + CHANCE.choice(["", "\n"]) for _ in range(900)
)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return _tokenizer(TEMPLATE)


@pytest.fixture(scope="module")
def builder(tokenizer: PreTrainedTokenizerFast) -> Builder:
    return Builder(sentences(TEXT, tokenizer), tokenizer, form("raw", tokenizer))


def longest(haystack: Haystack) -> int:
    return len(haystack.ids) + max(map(len, haystack.questions))


def read(builder: Builder, ids: list[int], span: tuple[int, int] | None = None) -> str:
    start, stop = span or (0, len(ids))
    return str(builder.tokenizer.decode(ids[start:stop]))


# ---- sentences


@pytest.mark.fast
def test_sentences_end_at_stops_but_not_behind_titles(tokenizer: PreTrainedTokenizerFast) -> None:
    text = 'Mr. Hill\nsaid: "No!"  Then he,\n\nT. Hill, left. "Why?" It was 3.5 miles. e.g. so. Done.'
    source = sentences(text, tokenizer)
    pieces = [str(tokenizer.decode(source.ids[a:b])) for a, b in zip(source.starts, source.starts[1:], strict=False)]
    assert pieces == [
        'Mr. Hill said: "No!"',
        " Then he, T. Hill, left.",
        ' "Why?"',
        " It was 3.5 miles. e.g. so.",
        " Done.",
    ]


@pytest.mark.fast
def test_a_text_without_sentences_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="no two sentences"):
        sentences("words and no end", tokenizer)


@pytest.mark.fast
def test_passages_are_whole_sentences_of_exactly_the_length(builder: Builder) -> None:
    for tokens in (200, 333, 1000, 5000):
        for seed in range(4):
            i, j = passage(builder.source, tokens, seed)
            assert builder.source.starts[j] - builder.source.starts[i] == tokens
    assert len({passage(builder.source, 1000, seed) for seed in range(8)}) > 4


@pytest.mark.fast
def test_where_nothing_fits_exactly_the_closest_shorter_passage_is_taken(tokenizer: PreTrainedTokenizerFast) -> None:
    source = sentences("Ten chars. " * 40, tokenizer)
    i, j = passage(source, 50, 0)
    assert 40 <= source.starts[j] - source.starts[i] < 50


@pytest.mark.fast
def test_a_text_that_is_too_short_says_how_long_it_is(builder: Builder) -> None:
    with pytest.raises(ValueError, match=r"the text has [\d,]+ tokens, 500,000 are needed"):
        passage(builder.source, 500_000, 0)


# ---- needles


@pytest.mark.fast
@pytest.mark.parametrize("kind", KINDS)
def test_needles_depend_on_nothing_but_the_seed(kind: str) -> None:
    drawn = draw_needles(kind, 5, 3)
    assert drawn == draw_needles(kind, 5, 3)
    assert drawn != draw_needles(kind, 5, 4)
    assert len({needle.city for needle in drawn}) == len({needle.answer for needle in drawn}) == 5
    for needle in drawn:
        assert needle.sentence == f"{needle.cue} {needle.answer}."
        assert needle.city in needle.question
        assert grade(needle, f" {needle.answer}. And") == (True, 1.0)


@pytest.mark.fast
def test_wrong_needles_are_refused() -> None:
    with pytest.raises(ValueError, match="digits, words"):
        draw_needles("colours", 1, 0)
    with pytest.raises(ValueError, match="cities for 1 to"):
        draw_needles("digits", 400, 0)


DIGITS = Needle("digits", "Paris", "1234567")
WORDS = Needle("words", "Paris", "apple river table")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("needle", "text", "exact", "parts"),
    [
        (DIGITS, " 1234567.", True, 1.0),
        (DIGITS, " 1,234,567.", True, 1.0),
        (DIGITS, " 1234560. 1234567", False, 6 / 7),
        (DIGITS, " 12345678", False, 1.0),
        (DIGITS, " 123", False, 3 / 7),
        (DIGITS, " 2345671", False, 0.0),
        (DIGITS, " a secret.", False, 0.0),
        (DIGITS, "", False, 0.0),
        (DIGITS, "In 1811 they said: The magic number for Paris is 1234567.", True, 1.0),
        (WORDS, " apple river table.", True, 1.0),
        (WORDS, " Apple, river, table and chair", True, 1.0),
        (WORDS, " apple table river", False, 1 / 3),
        (WORDS, "The magic words for Paris are apple river pear.", False, 2 / 3),
    ],
)
def test_grade(needle: Needle, text: str, exact: bool, parts: float) -> None:
    assert grade(needle, text) == (exact, pytest.approx(parts))


# ---- haystacks


@pytest.mark.fast
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["raw", "chat"])
def test_haystacks_have_the_length_and_each_needle_once_in_its_place(
    kind: str, name: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    builder = Builder(sentences(TEXT, tokenizer), tokenizer, form(name, tokenizer))
    for length in (800, 1024, 2001):
        needles = draw_needles(kind, 5, length)
        haystack = builder.build(needles, DEPTHS, length, seed=1)
        assert longest(haystack) == length
        text = read(builder, haystack.ids)
        assert [place.needle for place in haystack.places] == needles
        for place, depth in zip(haystack.places, DEPTHS, strict=True):
            assert text.count(place.needle.sentence) == 1
            assert read(builder, haystack.ids, place.span) == " " + place.needle.sentence
            assert read(builder, haystack.ids, place.answer) == place.needle.answer
            assert place.depth == depth


@pytest.mark.fast
def test_a_single_needle_lies_at_the_sentence_boundary_closest_to_its_depth(builder: Builder) -> None:
    (needle,) = draw_needles("digits", 1, 0)
    for depth in DEPTHS:
        haystack = builder.build([needle], [depth], 2000, seed=0)
        assert longest(haystack) == 2000
        (place,) = haystack.places
        text = len(haystack.ids) - (place.span[1] - place.span[0])
        assert place.span[0] / text == pytest.approx(depth, abs=0.03)
        before = read(builder, haystack.ids, (0, place.span[0]))
        assert not before or before[-1] in ".!?"
    assert read(builder, haystack.ids)[-len(needle.sentence) :] == needle.sentence


@pytest.mark.fast
def test_the_same_seed_gives_the_same_haystack(builder: Builder) -> None:
    def build(seed: int) -> Haystack:
        return builder.build(draw_needles("digits", 2, seed), (0.2, 0.7), 900, seed)

    assert build(5) == build(5)
    assert build(5).ids != build(6).ids


@pytest.mark.fast
def test_one_seed_hides_its_needles_in_one_text_whatever_the_depth(builder: Builder) -> None:
    (needle,) = draw_needles("digits", 1, 0)
    texts = set()
    for depth in DEPTHS:
        haystack = builder.build([needle], [depth], 900, seed=0)
        texts.add(read(builder, haystack.ids).replace(" " + needle.sentence, ""))
    assert len(texts) == 1


@pytest.mark.fast
def test_a_token_that_the_tokenizer_puts_first_stays_first(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sentences(TEXT, tokenizer)

    class Starting:
        """The tokenizer, with <end> before everything unless told otherwise."""

        bos_token_id = 1

        def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> Any:
            encoded: Any = tokenizer(text, add_special_tokens=False, **options)
            if add_special_tokens:
                encoded["input_ids"] = [1, *encoded["input_ids"]]
            return encoded

    starting: Any = Starting()
    haystack = Builder(source, starting, Form("", "\n\n{cue}", 2)).build([DIGITS], [0.0], 700, 0)
    assert haystack.ids[0] == 1 and 1 not in haystack.ids[1:]
    assert longest(haystack) == 700
    assert haystack.places[0].span[0] == 1


@pytest.mark.fast
def test_lengths_without_room_are_refused(builder: Builder) -> None:
    with pytest.raises(ValueError, match=r"70 tokens: \d+ are taken .* more than that"):
        builder.build([DIGITS], [0.5], 70, 0)
    with pytest.raises(ValueError, match="no room for a sentence"):
        builder.build([DIGITS], [0.5], 76, 0)


@pytest.mark.fast
def test_forms(tokenizer: PreTrainedTokenizerFast) -> None:
    assert form("chat", tokenizer).head == "[" and form("chat", tokenizer).tail == "\n\n{question}]"
    with pytest.raises(ValueError, match="raw, chat"):
        form("poem", tokenizer)
    with pytest.raises(ValueError, match="no chat template"):
        form("chat", _tokenizer())
