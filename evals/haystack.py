"""Prompts of an exact number of tokens: a needle sentence, or several, between the sentences of a text.

Everything is put together from token ids, so that lengths, depths and the place of every needle are known, not guessed.
"""

from __future__ import annotations

import bisect
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DIGITS = 7
WORDS = 3
_CITIES = (
    "Athens Bergen Bogota Boston Cairo Chicago Dakar Delhi Denver Dublin Geneva Hanoi Havana Helsinki Istanbul Jakarta "
    "Karachi Lagos Lima Lisbon Madrid Manila Milan Montreal Moscow Mumbai Nairobi Naples Osaka Oslo Paris Prague Quito "
    "Riga Santiago Seoul Sofia Stockholm Sydney Tokyo Toronto Tunis Vienna Warsaw Zurich"
)
_NOUNS = (
    "anchor apple arrow basket bell bottle bridge butter button camel candle carpet castle cherry copper cotton dragon "
    "eagle engine feather forest garden glass guitar hammer honey island jacket kettle ladder lemon magnet marble "
    "mirror monkey ocean olive orange paper pencil pepper piano pillow pocket rabbit ribbon river rocket saddle "
    "salmon silver spider sugar table thunder tiger tower tunnel turtle valley violin wagon window"
)
CITIES, NOUNS = _CITIES.split(), _NOUNS.split()
# A full stop behind a title or an initial ends nothing. The next sentence may open with a quotation mark.
_SENTENCE_END = re.compile(
    r"(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)(?<!\b[A-Z])[.!?][\"'\u201d\u2019)_]*(?= [\"'\u201c\u2018(_]*[A-Z])"
)


@dataclass(frozen=True)
class Kind:
    """A sort of needle: the sentence up to its answer, and the question that asks for it."""

    cue: str
    question: str
    pattern: str  # of one part of the answer


KINDS = {
    "digits": Kind("The magic number for {city} is", "What is the magic number for {city}?", r"\d"),
    "words": Kind("The magic words for {city} are", "What are the magic words for {city}?", r"[a-z]+"),
}


@dataclass(frozen=True)
class Needle:
    """What is hidden. kind: a key of `KINDS`; answer: what has to be found, seven digits or three words."""

    kind: str
    city: str
    answer: str

    @property
    def cue(self) -> str:
        return KINDS[self.kind].cue.format(city=self.city)

    @property
    def question(self) -> str:
        return KINDS[self.kind].question.format(city=self.city)

    @property
    def sentence(self) -> str:
        return f"{self.cue} {self.answer}."


def draw_needles(kind: str, count: int, seed: int) -> list[Needle]:
    """`count` needles of different cities, the same ones for the same seed.

    Raises ValueError for an unknown kind and for more needles than there are cities.
    """
    if kind not in KINDS:
        raise ValueError(f"there are no needles of the kind {kind!r}: {', '.join(KINDS)}")
    if not 1 <= count <= len(CITIES):
        raise ValueError(f"{count} needles: there are cities for 1 to {len(CITIES)}")
    chance = random.Random(f"needles {seed}")
    return [Needle(kind, city, _answer(kind, chance)) for city in chance.sample(CITIES, count)]


def _answer(kind: str, chance: random.Random) -> str:
    if kind == "digits":
        return str(chance.randrange(10 ** (DIGITS - 1), 10**DIGITS))
    return " ".join(chance.sample(NOUNS, WORDS))


def grade(needle: Needle, text: str) -> tuple[bool, float]:
    """Whether the generated text gives the answer, and which share of its parts (digits, words) stands in its place.

    What counts is the text behind the needle's cue where the model repeats it, else all of it: the first number in it,
    or as many of its first words as the answer has.
    """
    _, repeated, behind = text.partition(needle.cue)
    given = _parts(needle, behind if repeated else text)
    wanted = re.findall(KINDS[needle.kind].pattern, needle.answer)
    right = sum(a == b for a, b in zip(given, wanted, strict=False))  # the given ones may be fewer
    return given == wanted, right / len(wanted)


def _parts(needle: Needle, text: str) -> list[str]:
    pattern = KINDS[needle.kind].pattern
    if needle.kind == "digits":
        number = re.search(r"\d[\d,]*", text)
        return re.findall(pattern, number.group()) if number else []
    return re.findall(pattern, text.lower())[: len(needle.answer.split())]


# ---- how it is asked


@dataclass(frozen=True)
class Form:
    """What stands around the haystack. head, tail: text before and behind it, `{cue}` and `{question}` are filled in;
    extra: tokens that may be generated beyond those of the answer."""

    head: str
    tail: str
    extra: int


FORMS = ("raw", "chat")


def form(name: str, tokenizer: PreTrainedTokenizerBase) -> Form:
    """raw: a blank line and the needle's own beginning, to be continued. chat: the haystack and a question as a user's
    message, answered freely.

    Raises ValueError for an unknown name, or chat without a chat template.
    """
    if name == "raw":
        return Form("", "\n\n{cue}", extra=2)
    if name != "chat":
        raise ValueError(f"there is no form {name!r}: {', '.join(FORMS)}")
    if tokenizer.chat_template is None:
        raise ValueError("this model's tokenizer has no chat template: use the form raw")
    message = [{"role": "user", "content": "HAYSTACK\n\n{question}"}]
    text: Any = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    head, _, tail = text.partition("HAYSTACK")
    return Form(head, tail, extra=24)


# ---- the text


@dataclass(frozen=True)
class Sentences:
    """A text as token ids and the indices at which its sentences start; the last index is where one ends."""

    ids: list[int]
    starts: list[int]


def sentences(text: str, tokenizer: PreTrainedTokenizerBase) -> Sentences:
    """All white space, paragraphs too, becomes single blanks: a blank line stands before the question only.

    Raises ValueError for a text with fewer than two sentences, or a tokenizer that cannot say where its tokens lie.
    """
    if not tokenizer.is_fast:
        raise ValueError("finding sentences takes a tokenizer that knows the place of its tokens (a fast one)")
    text = " ".join(text.split())
    encoded: Any = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
    begins = [begin for begin, _ in encoded["offset_mapping"]]
    starts = {0, len(begins)} if text.endswith((".", "!", "?")) else {0}
    for match in _SENTENCE_END.finditer(text):
        index = bisect.bisect_left(begins, match.end())
        if index < len(begins) and begins[index] <= match.end() + 1:  # some tokenizers count the blank, others do not
            starts.add(index)
    if len(starts) < 2:
        raise ValueError("the text has no two sentences to put a needle between: take another text")
    return Sentences(encoded["input_ids"], sorted(starts))


def passage(source: Sentences, tokens: int, seed: int) -> tuple[int, int]:
    """Sentences from `source.starts[i]` to `source.starts[j]` that have exactly `tokens` tokens: (i, j).

    The search begins at a place drawn from the seed; if no run of sentences fits exactly, the closest shorter one is
    taken. Raises ValueError when the text is shorter than that.
    """
    starts, end = source.starts, source.starts[-1]
    if end - starts[0] < tokens:
        raise ValueError(
            f"the text has {len(source.ids):,} tokens, {tokens:,} are needed: take a longer text or a shorter length"
        )
    begin = random.Random(f"passage {seed}").randrange(bisect.bisect_right(starts, end - tokens))
    order = [*range(begin, len(starts)), *range(begin)]
    runs = [(i, bisect.bisect_right(starts, starts[i] + tokens) - 1) for i in order if starts[i] + tokens <= end]
    return max(runs, key=lambda run: starts[run[1]] - starts[run[0]])  # the first of equals


# ---- the prompt


@dataclass(frozen=True)
class Place:
    """Where a needle lies in a haystack. depth: share of the text before it, as asked for; span: its first token and
    the one behind its last; answer: the same of the answer in it."""

    needle: Needle
    depth: float
    span: tuple[int, int]
    answer: tuple[int, int]


@dataclass(frozen=True)
class Haystack:
    """Token ids. ids: the form's head, and the text with the needles in it; questions: what follows it to ask for the
    needle of each place."""

    ids: list[int]
    places: tuple[Place, ...]
    questions: tuple[list[int], ...]


@dataclass(frozen=True)
class Builder:
    """Builds haystacks out of one text, for one tokenizer and form."""

    source: Sentences
    tokenizer: PreTrainedTokenizerBase
    form: Form

    def build(self, needles: Sequence[Needle], depths: Sequence[float], length: int, seed: int) -> Haystack:
        """A haystack that has `length` tokens together with the longest of its questions (or just fewer, where no run
        of sentences fits exactly). Needle i lies at the sentence boundary closest to the share `depths[i]` of the text.

        Raises ValueError when nothing of the text would have room, or the text is too short.
        """
        questions = [self._ids(self._fill(self.form.tail, needle)) for needle in needles]
        head = self._head()
        pieces = [self._ids(" " + needle.sentence) for needle in needles]
        around = len(head) + sum(map(len, pieces)) + max(map(len, questions))
        if around >= length:
            raise ValueError(f"{length} tokens: {around} are taken by needles and question, so take more than that")
        i, j = passage(self.source, length - around, seed)
        if i == j:
            raise ValueError(f"{length} tokens leave no room for a sentence beside needles and question: take more")
        ids, places = self._insert(head, self.source.starts[i : j + 1], pieces, needles, depths)
        return Haystack(ids, tuple(places), tuple(questions))

    def room(self, needle: Needle) -> int:
        """Tokens that may be generated to answer."""
        return len(self._ids(" " + needle.answer)) + self.form.extra

    def _insert(
        self,
        head: list[int],
        starts: list[int],
        pieces: Sequence[list[int]],
        needles: Sequence[Needle],
        depths: Sequence[float],
    ) -> tuple[list[int], list[Place]]:
        ids, at = list(head), starts[0]
        places: dict[int, Place] = {}
        for index in sorted(range(len(needles)), key=lambda index: depths[index]):
            boundary = _closest(starts, starts[0] + depths[index] * (starts[-1] - starts[0]))
            ids += self.source.ids[at:boundary]
            start, at = len(ids), boundary
            ids += pieces[index]
            low, high = self._answer_span(needles[index])
            places[index] = Place(needles[index], depths[index], (start, len(ids)), (start + low, start + high))
        ids += self.source.ids[at : starts[-1]]
        return ids, [places[index] for index in range(len(needles))]

    def _answer_span(self, needle: Needle) -> tuple[int, int]:
        """The tokens of the answer, counted in those of the needle's sentence."""
        text = " " + needle.sentence
        begin, end = len(text) - len(needle.answer) - 1, len(text) - 1
        encoded: Any = self.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        inside = [i for i, (low, high) in enumerate(encoded["offset_mapping"]) if high > begin and low < end]
        return inside[0], inside[-1] + 1

    def _fill(self, text: str, needle: Needle) -> str:
        return text.replace("{cue}", needle.cue).replace("{question}", needle.question)

    def _head(self) -> list[int]:
        """The form's head; before a text that stands alone, the special tokens that the tokenizer would put there."""
        if self.form.head:
            return self._ids(self.form.head)
        bos = self.tokenizer.bos_token_id
        encoded: Any = self.tokenizer("a")
        return encoded.input_ids[:1] if bos is not None and encoded.input_ids[:1] == [bos] else []

    def _ids(self, text: str) -> list[int]:
        encoded: Any = self.tokenizer(text, add_special_tokens=False)
        return encoded.input_ids


def _closest(starts: Sequence[int], wanted: float) -> int:
    return min(starts, key=lambda start: abs(start - wanted))
