"""The adapter for lm-evaluation-harness, on tasks and a model that lie in a folder."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.evals.caches import build_cache, parse_cache
from tests.helpers import call

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval is an extra: pip install 'lm-eval[hf]'")
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    from kvcache.evals.lm_eval_adapter import KVCacheLM

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness and datasets warn of their own affairs

LETTERS = "abcdefghijklmnopqrstuvwxyz .?"
STORY = "the cat sat on the mat and the dog lay by the door. " * 2
DOCUMENTS = [
    {"story": STORY + "who sat on the mat?", "choices": ["the cat", "a dog", "the mat"], "gold": 0},
    {"story": STORY + "who lay by the door?", "choices": ["the cat", "the dog", "no one"], "gold": 1},
    {"story": "short one. who is it?", "choices": ["me", "you", "they all"], "gold": 2},
]
TASKS = {
    "kv_choice": """
output_type: multiple_choice
doc_to_text: "{{story}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}]
""",
    "kv_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{story}}"
metric_list: [{metric: word_perplexity}]
""",
    "kv_generate": """
output_type: generate_until
doc_to_text: "{{story}}"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["?"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model, a tokenizer of letters, and the tasks with their documents."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from kvcache.models import tiny

    place = tmp_path_factory.mktemp("lm_eval")
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{letter: 3 + index for index, letter in enumerate(LETTERS)}}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )
    tokenizer.save_pretrained(place / "model")
    tiny.build("llama", dtype=torch.float32).save_pretrained(place / "model")
    (place / "documents.json").write_text("\n".join(json.dumps(document) for document in DOCUMENTS))
    for name, task in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {place / 'documents.json'}}}}}\n"
        (place / f"{name}.yaml").write_text(f"task: {name}\n{data}test_split: test\n{task.lstrip()}")
    return place


def evaluate(folder: Path, model: Any, tasks: list[str], **arguments: Any) -> dict[str, Any]:
    """Per task the harness' answers to its requests, in their order."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found: Any = lm_eval.simple_evaluate(
        model=model, tasks=tasks, task_manager=manager, bootstrap_iters=0, log_samples=True, **arguments
    )
    return {task: [sample["filtered_resps"] for sample in found["samples"][task]] for task in tasks}


def adapter(folder: Path, cache: str, **arguments: Any) -> KVCacheLM:
    return KVCacheLM(pretrained=str(folder / "model"), cache=cache, device="cpu", dtype="float32", **arguments)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    """What the harness' own model answers."""
    settings = {"pretrained": str(folder / "model"), "dtype": "float32"}
    return evaluate(folder, "hf", list(TASKS), model_args=settings, device="cpu")


@pytest.mark.parametrize("cache", ["full", "sink_h2o:slots=400"])
def test_nothing_evicted_gives_what_the_harness_own_model_gives(
    folder: Path, expected: dict[str, Any], cache: str
) -> None:
    settings = {"pretrained": str(folder / "model"), "dtype": "float32", "cache": cache}
    actual = evaluate(folder, "kvcache", list(TASKS), model_args=settings, device="cpu")
    assert actual["kv_generate"] == expected["kv_generate"]
    for task in ("kv_choice", "kv_rolling"):
        mine, theirs = _numbers(actual[task]), _numbers(expected[task])
        assert mine == pytest.approx(theirs, abs=2e-3) and len(mine) > 2


def _numbers(answers: Any) -> list[float]:
    if isinstance(answers, list | tuple):
        return [number for answer in answers for number in _numbers(answer)]
    return [float(answers == "True" if answers in ("True", "False") else answers)]


@pytest.mark.parametrize("cache", ["window:slots=12,margin=1", "sink_h2o:slots=16,margin=2"])
def test_a_continuation_is_scored_behind_an_evicted_context(folder: Path, cache: str) -> None:
    lm = adapter(folder, cache)
    context, continuation = lm.tok_encode(STORY), lm.tok_encode("the cat")
    (score, greedy), *others = lm._loglikelihood_tokens([(None, context, continuation)] * 2)
    assert others == [(score, greedy)], "the second of one context reads a copy of the first's cache"
    own = build_cache(parse_cache(cache), lm.model.config)
    expected = 0.0
    with torch.no_grad():
        logits = call(lm.model, own, torch.tensor([context])).logits[0, -1]
        for token in continuation:
            expected += float(logits.log_softmax(-1)[token])
            logits = call(lm.model, own, torch.tensor([[token]])).logits[0, -1]
    assert score == pytest.approx(expected, abs=1e-4)
    full = adapter(folder, "full")._loglikelihood_tokens([(None, context, continuation)])
    assert abs(full[0][0] - score) > 0.05


def test_too_long_contexts_lose_their_beginning(folder: Path) -> None:
    lm = adapter(folder, "full", max_length=32)
    context, continuation = lm.tok_encode(STORY), lm.tok_encode("cat")
    cut = lm._loglikelihood_tokens([(None, context, continuation), (None, context[-30:], continuation)])
    assert cut[0] == pytest.approx(cut[1])
    with pytest.raises(ValueError, match="longer than max_length=32"):
        lm._loglikelihood_tokens([(None, context, context)])


def test_chunks_score_as_single_tokens_do_where_nothing_is_evicted(folder: Path) -> None:
    request = [(None, [5], adapter(folder, "full").tok_encode(STORY))]
    single, chunked = (
        adapter(folder, "full", chunk=chunk, prefill_chunk=3)._loglikelihood_tokens(request)[0][0] for chunk in (1, 7)
    )
    assert single == pytest.approx(chunked, abs=1e-3) and math.isfinite(single)


def test_the_cache_comes_as_one_argument_or_in_parts(folder: Path) -> None:
    place = folder / "model"
    arguments = f"pretrained={place},cache=sink_h2o:sinks=1,window=4,heavy_hitters=3,dtype=float32,device=cpu"
    assert str(KVCacheLM.create_from_arg_string(arguments).spec) == "sink_h2o:sinks=1,window=4,heavy_hitters=3"
    assert str(adapter(folder, "window", slots=9).spec) == "window:slots=9"
    for wrong, message in (("sinkh2o", "unknown cache"), ("window:sinks=3", "unknown option")):
        with pytest.raises(ValueError, match=message):
            adapter(folder, wrong)
    with pytest.raises(ValueError, match="chunk=0"):
        adapter(folder, "full", chunk=0)


def test_command(folder: Path, tmp_path: Path) -> None:
    arguments = f"pretrained={folder / 'model'},cache=sink_h2o:slots=24"
    command = [sys.executable, "-m", "kvcache.evals.lm_eval_command", "--model", "kvcache", "--model_args", arguments]
    command += [
        "--tasks",
        "kv_choice",
        "--include_path",
        str(folder),
        "--device",
        "cpu",
        "--output_path",
        str(tmp_path),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = tmp_path.rglob("results*.json")
    assert 0 <= json.loads(result.read_text())["results"]["kv_choice"]["acc,none"] <= 1
