"""Needles in a haystack: prompts to the token, grades, and the command on tiny models and on the real one."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedTokenizerFast

from kvcache import Budget, EvictingCache
from kvcache.cli import main
from kvcache.evals.caches import build_cache, parse_cache
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
from kvcache.evals.needle import ASKS, Case, Needles, cases, chart, kept_share, scores, tables
from kvcache.models.load import load
from kvcache.policies import Recency
from tests.helpers import call, shared_model, tokens
from tests.test_cli import TEMPLATE, _tokenizer, save

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
    for count in (200, 333, 1000, 5000):
        for seed in range(4):
            i, j = passage(builder.source, count, seed)
            assert builder.source.starts[j] - builder.source.starts[i] == count
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
        (DIGITS, "The magic number for Paris is 1234567. The magic number for Paris is", True, 1.0),
        (DIGITS, "The magic number for Lima is 1934560.", False, 5 / 7),
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
    haystacks = [builder.build([needle], [depth], 2000, seed=0) for depth in DEPTHS]
    for depth, haystack in zip(DEPTHS, haystacks, strict=True):
        assert longest(haystack) == 2000
        (place,) = haystack.places
        text = len(haystack.ids) - (place.span[1] - place.span[0])
        assert place.span[0] / text == pytest.approx(depth, abs=0.03)
        before = read(builder, haystack.ids, (0, place.span[0]))
        assert not before or before[-1] in ".!?"
    assert read(builder, haystacks[-1].ids)[-len(needle.sentence) :] == needle.sentence


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


# ---- measuring


@pytest.fixture(scope="module")
def needles(builder: Builder) -> Needles:
    return Needles(shared_model("llama"), builder, (0.0, 0.5, 1.0))


def greedy(needles: Needles, haystack: Haystack, index: int) -> str:
    """The answer by whole forwards, without any cache."""
    ids = haystack.ids + haystack.questions[index]
    start = len(ids)
    for _ in range(needles.builder.room(haystack.places[index].needle)):
        logits = needles.model(input_ids=torch.tensor([ids]), use_cache=False).logits
        token = int(logits[0, -1].argmax())
        if token == needles.builder.tokenizer.eos_token_id:
            break
        ids.append(token)
    return str(needles.builder.tokenizer.decode(ids[start:]))


@pytest.mark.fast
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("chunk", [None, 50])
@pytest.mark.parametrize("cache", ["full", "sink_h2o:slots=100%"])
def test_caches_that_hold_everything_answer_like_no_cache_at_all(
    ask: str, chunk: int | None, cache: str, builder: Builder
) -> None:
    needles = Needles(shared_model("llama"), builder, (0.0, 0.5, 1.0), chunk)
    trials = needles.measure(Case(cache, 440, ask, "several", "digits", 0))
    haystack = builder.build(draw_needles("digits", 3, 0), needles.depths, 440, 0)
    with torch.no_grad():
        expected = [greedy(needles, haystack, index) for index in range(3)]
    assert [trial.answer for trial in trials] == expected
    assert all(trial.kept == trial.kept_answer == 1 for trial in trials)
    for trial, place, question in zip(trials, haystack.places, haystack.questions, strict=True):
        assert (trial.depth, trial.city, trial.expected) == (place.depth, place.needle.city, place.needle.answer)
        assert trial.tokens == len(haystack.ids) + len(question) <= 440


@pytest.mark.fast
@pytest.mark.parametrize("ask", ASKS)
def test_no_part_of_an_answer_comes_before_the_eviction(ask: str, needles: Needles) -> None:
    """The first token of the answer is what the evicted cache gives, not what the whole prompt would."""
    case = Case("window:window=8,margin=1", 300, ask, "single", "digits", 0)
    haystack = needles.builder.build(draw_needles("digits", 3, 0)[:1], [0.0], 300, 0)
    ids = torch.tensor([haystack.ids + haystack.questions[0]])
    cache = build_cache(parse_cache(case.cache), needles.model.config)
    split = ids.shape[1] - 1 if ask == "known" else len(haystack.ids)
    with torch.no_grad():
        for part in (ids[:, :split], ids[:, split:-1]):
            if part.shape[1]:
                call(needles.model, cache, part)
        logits = call(needles.model, cache, ids[:, -1:]).logits
    first = str(needles.builder.tokenizer.decode([int(logits[0, -1].argmax())]))
    trial = needles.measure(case)[0]
    assert trial.answer.startswith(first)
    assert trial.kept == 0


@pytest.mark.fast
@pytest.mark.parametrize("cache", ["sink_h2o:slots=25%,margin=4", "streaming_llm:slots=25%", "full"])
def test_questions_asked_afterwards_do_not_disturb_each_other(cache: str, needles: Needles) -> None:
    case = Case(cache, 400, "afterwards", "several", "digits", 1)
    together = needles.measure(case)
    haystack = needles.builder.build(draw_needles("digits", 3, 1), needles.depths, 400, 1)
    for index, trial in enumerate(together):
        alone = Haystack(haystack.ids, haystack.places[index : index + 1], haystack.questions[index : index + 1])
        with torch.inference_mode():
            assert needles._ask(case, alone) == [trial]


@pytest.mark.fast
def test_a_single_needle_is_measured_at_every_depth(needles: Needles) -> None:
    trials = needles.measure(Case("streaming_llm:slots=25%,margin=1", 400, "known", "single", "digits", 2))
    assert [trial.depth for trial in trials] == [0.0, 0.5, 1.0]
    assert trials[1].kept == trials[1].kept_answer == 0
    assert 0 < trials[0].kept < 0.3 and trials[0].kept_answer == 0  # four sinks
    assert trials[2].kept == 1


@pytest.mark.fast
def test_kept_share_counts_what_the_layers_hold() -> None:
    model = shared_model("llama")
    cache = EvictingCache(model.config, Recency(), Budget(sinks=2, window=10, heavy_hitters=0, margin=1))
    with torch.no_grad():
        call(model, cache, tokens(1, 40))
    assert kept_share(cache, 0, 4) == pytest.approx(0.5)
    assert kept_share(cache, 28, 32) == pytest.approx(0.5)
    assert kept_share(cache, 30, 40) == 1
    assert kept_share(cache, 5, 20) == 0
    assert kept_share(DynamicCache(config=model.config), 0, 4) == 1


# ---- figures


def trial(depth: float, exact: bool, parts: float = 0.5) -> dict[str, Any]:
    return {"depth": depth, "exact": exact, "parts": parts, "kept": parts, "kept_answer": 0.25}


def cell(cache: str, seed: int, trials: list[dict[str, Any]], ask: str = "known", length: int = 512) -> dict[str, Any]:
    case = Case(cache, length, ask, "single", "digits", seed)
    return {case.key: {**vars(case), "trials": trials}}


@pytest.mark.fast
def test_scores_pool_seeds_and_depths() -> None:
    cells = cell("full", 0, [trial(0.0, True), trial(1.0, True)]) | cell(
        "full", 1, [trial(0.0, False), trial(1.0, True)]
    )
    by_depth = {score.depth: score for score in scores(cells)}
    assert {depth: (score.n, score.exact) for depth, score in by_depth.items()} == {
        None: (4, 0.75),
        0.0: (2, 0.5),
        1.0: (2, 1.0),
    }
    assert by_depth[None].exact_interval == pytest.approx((0.3006, 0.9544), abs=1e-3)
    assert by_depth[None].parts_interval == pytest.approx((0.1500, 0.8500), abs=1e-3)
    assert by_depth[0.0].kept_answer == 0.25


@pytest.mark.fast
def test_cases_put_the_full_cache_first_once() -> None:
    grid = cases(["sink_h2o:slots=25%", "full"], [512, 1024], seeds=range(2))
    assert [case.cache for case in grid[:2]] == ["full", "sink_h2o:slots=25%"]
    assert len(grid) == len({case.key for case in grid}) == 2 * 2 * 2 * 2
    assert {case.seed for case in grid[:8]} == {0}
    with pytest.raises(ValueError, match="'never' is none of known, afterwards"):
        cases(["full"], [512], asks=["never"])
    with pytest.raises(ValueError, match="unknown cache 'half'"):
        cases(["half"], [512])


@pytest.mark.fast
def test_unfinished_grids_can_be_shown(tmp_path: Path) -> None:
    cells = cell("full", 0, [trial(0.0, True), trial(1.0, True)]) | cell("window:slots=25%", 0, [trial(0.0, False)])
    cells |= cell("full", 0, [trial(0.5, True)], ask="afterwards", length=9000)
    content = {"settings": {"trained_length": 8192}, "cells": cells}
    known, afterwards = tables(content)
    assert known.row_count == 2 and afterwards.row_count == 1
    assert "8,192" not in str(known.caption) and "8,192" in str(afterwards.caption)
    chart(content, tmp_path / "charts" / "needle.png")
    assert (tmp_path / "charts" / "needle.png").read_bytes()[:4] == b"\x89PNG"


# ---- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and a text."""
    folder = tmp_path_factory.mktemp("needle")
    save(folder / "model", "llama", TEMPLATE, max_position_embeddings=1024)
    (folder / "text.txt").write_text(TEXT)
    return folder


def arguments(folder: Path, *more: str) -> list[str]:
    given = ["--model", str(folder / "model"), "--text", str(folder / "text.txt"), "--device", "cpu"]
    return ["eval", "needle", *given, "--lengths", "400", "--repeats", "1", "--depths", "0", "100", *more]


@pytest.mark.fast
def test_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "needle.json"), "--png", str(tmp_path / "needle.png")]
    assert main(arguments(folder, "--cache", "sink_h2o:slots=50%", "--needles", "single", "several", *files)) == 0
    output = capsys.readouterr().out
    for part in ("question known, one needle", "question afterwards, several needles", "full", "sink_h2o 50%"):
        assert part in output
    result = json.loads((tmp_path / "needle.json").read_text())
    assert result["kind"] == "needle" and result["complete"] and len(result["cells"]) == 2 * 2 * 2
    assert result["settings"] == {"depths": [0.0, 1.0], "form": "raw", "chunk": None, "trained_length": 1024}
    (text,) = result["provenance"]["texts"]
    assert text["name"] == "text.txt" and text["tokens"] > 10_000
    assert {(score.n, score.kept) for score in scores(result["cells"]) if score.cache == "full"} == {(1, 1.0), (2, 1.0)}
    assert (tmp_path / "needle.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.fast
def test_an_interrupted_run_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "needle.json"
    command = arguments(folder, "--cache", "window:slots=25%", "--json", str(file))
    measure, measured = Needles.measure, []

    def interrupted(self: Needles, case: Case) -> Any:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(case.key)
        return measure(self, case)

    monkeypatch.setattr(Needles, "measure", interrupted)
    assert main(command) == 130
    partial = json.loads(file.read_text())
    assert not partial["complete"] and list(partial["cells"]) == measured
    monkeypatch.setattr(Needles, "measure", lambda self, case: measured.append(case.key) or measure(self, case))
    assert main(command) == 0
    result = json.loads(file.read_text())
    assert result["complete"] and list(result["cells"]) == measured and len(measured) == 4
    assert {key: result["cells"][key] for key in partial["cells"]} == partial["cells"]
    assert main([*command, "--form", "chat"]) == 2


@pytest.mark.fast
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cache", "sink_h2o:slots=0"], "slots=0"),
        (["--cache", "recompute:window=100"], "for kvcache eval ppl only"),
        (["--cache", "nothing"], "unknown cache 'nothing': there are full"),
        (["--lengths", "400", "70"], "70 tokens: .* take more"),
        (["--lengths", "400", "999999"], "take a longer text or a shorter length"),
        (["--text", "/nowhere/at all.txt"], "no such text"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_measured(
    more: list[str],
    message: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "needle.json"
    assert main(arguments(folder, "--json", str(file), *more)) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and not file.exists()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--depths", "120"], "'120' is not a depth from 0 to 100"),
        (["--ask", "never"], "invalid choice: 'never'"),
        (["--repeats", "0"], "whole number from 1 on"),
    ],
)
def test_wrong_options_are_refused(
    more: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments(folder, *more))
    assert message in capsys.readouterr().err


# ---- the real model


@pytest.mark.model
def test_the_real_model_finds_needles_with_the_full_cache_and_not_where_the_window_has_left_them() -> None:
    model, tokenizer = load("smollm2")
    builder = Builder(sentences(TEXT, tokenizer), tokenizer, form("raw", tokenizer))
    needles = Needles(model, builder, (0.1, 0.9))
    full = needles.measure(Case("full", 512, "afterwards", "several", "digits", 0))
    assert [trial.exact for trial in full] == [True, True]
    window = needles.measure(Case("streaming_llm:slots=25%", 512, "afterwards", "several", "digits", 0))
    assert [trial.exact for trial in window] == [False, True]
    assert window[0].kept == 0 and window[1].kept == 1
