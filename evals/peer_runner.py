"""Runs token ids through the caches of kvpress, in an environment of its own. Started by `evals/peers.py`.

Needs torch, transformers (below 5.3) and kvpress, nothing of this project. On standard input one JSON object per line:
settings first, then jobs, each answered by a line. A job that fails is answered by {"error": ...}.

A press compresses once, after the prefill: the tokens of `then` and those generated are added to what it kept, and
nothing is dropped any more. A press under `decoding` lets everything grow and compresses every few forwards instead.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from contextlib import contextmanager, nullcontext
from typing import Any

import kvpress  # pyright: ignore[reportMissingImports]
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

PRESSES = {
    "streaming_llm": kvpress.StreamingLLMPress,
    "snapkv": kvpress.SnapKVPress,
    "tova": kvpress.TOVAPress,
    "observed_attention": kvpress.ObservedAttentionPress,
    "expected_attention": kvpress.ExpectedAttentionPress,
    "knorm": kvpress.KnormPress,
}
NEEDS_EAGER = {"observed_attention"}


class Runner:
    """One model and what the jobs do with it. Ids are lists, results plain numbers."""

    def __init__(self, model: str, dtype: str, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.model = loaded.to(device).eval()
        self.attention = self.model.config._attn_implementation

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Do what the job's key `measure` says, with its other keys as arguments."""
        measures = {"score": self.score, "stream": self.stream, "generate": self.generate, "speed": self.speed}
        arguments = {key: value for key, value in job.items() if key != "measure"}
        return measures[job["measure"]](**arguments)

    def score(self, press: str | None, budget: int, prefill: list[int], then: list[int]) -> dict[str, Any]:
        """Negative log-likelihoods of `then`, in one forward behind the compressed prefill."""
        cache, logits = self._prefill(press, budget, prefill)
        kept, kept_bytes = _held(cache)
        rest = self._forward(cache, then, len(prefill), keep_all=True)
        nll = _nll(torch.cat([logits, rest[:, :-1]], dim=1), self._ids(then))
        return {"nll": nll, "kept": kept, "kv_bytes": kept_bytes}

    def generate(
        self,
        press: str | None,
        budget: int,
        prefill: list[int],
        then: list[int],
        new_tokens: int,
        stop: list[int],
    ) -> dict[str, Any]:
        """Greedy tokens behind the compressed prefill and `then`, which the press never saw; `stop` ends them."""
        cache, logits = self._prefill(press, budget, prefill)
        kept, kept_bytes = _held(cache)
        seen = len(prefill)
        if then:
            logits, seen = self._forward(cache, then, seen), seen + len(then)
        tokens: list[int] = []
        while len(tokens) < new_tokens:
            tokens.append(int(logits[0, -1].argmax()))
            if tokens[-1] in stop or len(tokens) == new_tokens:
                break
            logits, seen = self._forward(cache, tokens[-1:], seen), seen + 1
        return {"tokens": tokens, "kept": kept, "kv_bytes": kept_bytes}

    def speed(self, press: str | None, budget: int, prefill: list[int], then: list[int]) -> dict[str, Any]:
        """Seconds of each single-token forward over `then`, behind the compressed prefill."""
        cache, _ = self._prefill(press, budget, prefill)
        kept, kept_bytes = _held(cache)
        seconds = []
        for index, token in enumerate(then):
            self._synchronize()
            start = time.perf_counter()
            self._forward(cache, [token], len(prefill) + index)
            self._synchronize()
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "kept": kept, "kv_bytes": kept_bytes}

    def stream(self, press: str, budget: int, ids: list[int], chunk: int, every: int) -> dict[str, Any]:
        """Negative log-likelihoods of ids[1:], in chunks of `chunk` tokens, compressed to `budget` every `every`."""
        base = PRESSES[press](compression_ratio=0.0)
        interval = max(1, every // chunk)  # kvpress counts forwards
        decoding = kvpress.DecodingPress(base_press=base, compression_interval=interval, target_size=budget)
        self._choose_attention(press)
        cache, nll, most = self._cache(), [], 0
        start = time.perf_counter()
        with decoding(self.model):
            for at in range(0, len(ids) - 1, chunk):
                piece = ids[at : min(at + chunk, len(ids) - 1)]
                logits = self._forward(cache, piece, at, keep_all=True)
                nll += _nll(logits, self._ids(ids[at + 1 : at + 1 + len(piece)]))
                most = max(most, _held(cache)[1])
        seconds = time.perf_counter() - start
        kept, kept_bytes = _held(cache)
        return {"nll": nll, "kept": kept, "kv_bytes": kept_bytes, "peak_kv_bytes": most, "seconds": seconds}

    def _prefill(self, press: str | None, budget: int, ids: list[int]) -> tuple[DynamicCache, Tensor]:
        """The cache, compressed to `budget` tokens, and the last token's logits [1, 1, vocabulary]."""
        self._choose_attention(press)
        cache = self._cache()
        with _compressing(self.model, press, len(ids), budget):
            logits = self._forward(cache, ids, 0)
        kept = _held(cache)[0]
        wanted = len(ids) if press is None else min(budget, len(ids))
        if kept != wanted:
            raise RuntimeError(f"{press} kept {kept} tokens of {len(ids)}, {wanted} were asked for")
        return cache, logits

    def _forward(self, cache: DynamicCache, ids: list[int], seen: int, keep_all: bool = False) -> Tensor:
        """Logits [1, tokens or 1, vocabulary]. Positions go on from all tokens seen, as in kvpress' own pipeline: the
        cache counts only those it kept."""
        positions = torch.arange(seen, seen + len(ids), device=self.model.device)[None]
        with torch.no_grad():
            return self.model(
                input_ids=self._ids(ids),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=0 if keep_all else 1,
            ).logits

    def _choose_attention(self, press: str | None) -> None:
        """Eager attention where a press reads its weights; kvpress' other presses want the model's usual one."""
        wanted = "eager" if press in NEEDS_EAGER else self.attention
        if self.model.config._attn_implementation != wanted:
            self.model.set_attn_implementation(wanted)

    def _cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def _ids(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self.model.device)

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


def _compressing(model: Any, press: str | None, tokens: int, budget: int) -> Any:
    if press is None or budget >= tokens:
        return nullcontext()
    return PRESSES[press](compression_ratio=_ratio(tokens, budget))(model)


def _ratio(tokens: int, budget: int) -> float:
    """The share to drop so that exactly `budget` stay: kvpress rounds tokens * (1 - ratio) down, and half a token more
    keeps that from falling below."""
    return 1 - (budget + 0.5) / tokens


def _held(cache: DynamicCache) -> tuple[int, int]:
    """Tokens that the fullest layer holds, and the bytes behind all layers' keys and values."""
    layers: list[Any] = cache.layers
    tokens = max(layer.keys.shape[2] for layer in layers)
    return tokens, sum(x.untyped_storage().nbytes() for layer in layers for x in (layer.keys, layer.values))


def _nll(logits: Tensor, ids: Tensor) -> list[float]:
    """One number per id: logits [1, n, vocabulary] against ids [1, n]."""
    return cross_entropy(logits[0].float(), ids[0], reduction="none").tolist()


def versions() -> dict[str, str]:
    """What ran here."""
    names = ("torch", "transformers", "kvpress")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


@contextmanager
def _answers() -> Any:
    """Where answers go. Whatever else is printed in this process goes to standard error."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        yield answers


def main() -> None:
    logging.disable_progress_bar()
    with _answers() as answers:

        def answer(result: dict[str, Any]) -> None:
            print(json.dumps(result), file=answers, flush=True)

        runner = Runner(**json.loads(sys.stdin.readline()))
        answer({"versions": versions(), "presses": sorted(PRESSES)})
        for line in sys.stdin:
            try:
                answer(runner.run(json.loads(line)))
            except Exception as error:  # told to whoever asked; the next job may well work
                answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
