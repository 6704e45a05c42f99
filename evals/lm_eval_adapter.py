"""lm-evaluation-harness with our caches: registers the model type `kvcache`, and runs the harness' command with it.

    kvcache-lm-eval --model kvcache --model_args pretrained=smollm2,cache=sink_h2o:slots=512 --tasks lambada_openai

takes all that `lm_eval` takes, which by itself has no way to find model types of other packages. In a program of one's
own, importing this module is enough before `lm_eval.simple_evaluate(model="kvcache", ...)`.

Every request gets a cache of its own. A context is read first and evicted down to the budget; a continuation is then
scored token by token, each of which sees what the cache holds by then. (One forward over both, as the harness does it
for other models, would see everything and show nothing of the evictions.)
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from kvcache.evals.caches import build_cache, parse_cache
from kvcache.evals.generation import CACHE_ARGUMENT
from kvcache.models.load import load

try:
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(f"this takes lm-evaluation-harness: pip install 'kvcache-evict[lm-eval]' ({error})") from error

log = logging.getLogger(__name__)

Request = tuple[Any, list[int], list[int]]  # texts (the key of the harness' own cache), context, continuation


@register_model("kvcache")
class KVCacheLM(HFLM):
    """A model of transformers with one of our caches, as `--model kvcache`.

    Args:
        pretrained: what `kvcache.models.load` takes: smollm2, a folder, a .gguf file, a hub id.
        cache: as on our own command line, `sink_h2o:slots=512`.
        chunk: tokens of a continuation that are scored per forward, with evictions between forwards.
        prefill_chunk: tokens of a context that are read per forward; None: all in one.
        max_length: of context and continuation, in tokens; None: what the model was trained for.
        options: further options of the cache, so that `cache=sink_h2o:sinks=4,window=252` can be written between the
            commas of --model_args: there the second half comes as an option of its own.

    Raises:
        ValueError: no such model, cache or option.
    """

    def __init__(
        self,
        pretrained: str = "smollm2",
        cache: str = "sink_h2o",
        chunk: int = 1,
        prefill_chunk: int | None = None,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = 64,
        max_length: int | None = None,
        trust_remote_code: bool | None = None,
        **options: Any,
    ) -> None:
        if trust_remote_code:
            raise ValueError("trust_remote_code: models with code of their own are not supported")
        if chunk < 1 or (prefill_chunk is not None and prefill_chunk < 1):
            raise ValueError(f"chunk={chunk} and prefill_chunk={prefill_chunk} must be 1 or more")
        self.spec = parse_cache(_joined(cache, options))
        self.chunk, self.prefill_chunk = chunk, prefill_chunk
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        model, tokenizer = load(pretrained, dtype=_dtype(dtype, place), device=place)
        self._evicted_config = model.config
        build_cache(self.spec, model.config, 1024)  # what cannot be built says so now
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            max_length=max_length,
        )

    def new_cache(self, length: int) -> Cache:
        """An empty cache for a request whose prompt has `length` tokens."""
        return build_cache(self.spec, self._evicted_config, length)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Sum of the log-likelihoods of each continuation, and whether greedy decoding would give it.

        Requests that follow each other with the same context (the choices of a question) share its reading: each gets a
        copy of the cache.
        """
        results = []
        shown: Any = _bar(requests, disable_tqdm or self.rank != 0)
        for context, group in groupby(shown, key=lambda request: request[1]):
            continuations = list(group)
            length = self.max_length
            longest = max(len(continuation) for _, _, continuation in continuations)
            if len(context) + longest > length + 1:
                log.warning("context of %d and continuation of %d tokens: cut to %d", len(context), longest, length)
            if longest > length:
                raise ValueError(f"a continuation of {longest} tokens is longer than max_length={length}")
            kept = context[-max(1, length + 1 - longest) :]
            cache = self.new_cache(len(kept))
            first = self._read(kept, cache)
            for index, (texts, _, continuation) in enumerate(continuations):
                own = cache if index == len(continuations) - 1 else copy.deepcopy(cache)
                result = self._score(first, continuation, own)
                results.append(result)
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def _score(self, first: Tensor, continuation: Sequence[int], cache: Cache) -> tuple[float, bool]:
        """first: logits `[1, vocabulary]` of the continuation's first token."""
        logits = [first]
        for start in range(0, len(continuation) - 1, self.chunk):
            part = continuation[start : min(start + self.chunk, len(continuation) - 1)]
            logits.append(self._forward(part, cache, keep=0))
        likelihoods = torch.cat(logits).float().log_softmax(-1)  # [tokens, vocabulary]
        wanted = torch.tensor(continuation, device=likelihoods.device)
        total = likelihoods.gather(1, wanted[:, None]).sum()
        return float(total), bool((likelihoods.argmax(-1) == wanted).all())

    def _read(self, context: Sequence[int], cache: Cache) -> Tensor:
        """Logits `[1, vocabulary]` behind the context."""
        size = self.prefill_chunk or len(context)
        for start in range(0, len(context), size):
            logits = self._forward(context[start : start + size], cache, keep=1)
        return logits  # pyright: ignore[reportPossiblyUnboundVariable]  # a context has a token at least

    def _forward(self, ids: Sequence[int], cache: Cache, keep: int) -> Tensor:
        """Logits `[tokens, vocabulary]` of the last `keep` tokens, of all for 0."""
        arguments: dict[str, Any] = {CACHE_ARGUMENT: cache, "use_cache": True, "logits_to_keep": keep}
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([ids], device=self.device), **arguments).logits[0]

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        cache = {CACHE_ARGUMENT: self.new_cache(context.shape[1])}
        return super()._model_generate(context, max_length, stop, **cache, **options)


def _joined(cache: str, options: dict[str, Any]) -> str:
    """The cache's written form, with the options that came apart from it."""
    rest = ",".join(f"{name}={value}" for name, value in options.items())
    if not rest:
        return cache
    return f"{cache}{',' if ':' in cache else ':'}{rest}"


def _dtype(name: str | torch.dtype | None, device: str) -> torch.dtype:
    if isinstance(name, torch.dtype):
        return name
    if name in (None, "auto"):
        return torch.float32 if device == "cpu" else torch.bfloat16
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}: float32, bfloat16, float16, float64")
    return found


def _bar(requests: list[Request], hidden: bool) -> Any:
    from tqdm import tqdm

    return tqdm(requests, disable=hidden, desc="log-likelihoods")


def main() -> None:
    """The harness' own command, with `--model kvcache` in it."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    cli_evaluate()
