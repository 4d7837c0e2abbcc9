"""Files that servers of the tests are started with, made when a configuration names them."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.weights import load_model, save_model
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.conftest import random_model, raw_config, rewrite
from tests.engine.hybrid import BLOCK_SIZE, SHAPE, save_random_hybrid
from tests.engine.seeing import save_seeing_hybrid
from tests.engine.target_kinds import GEMMA4_KINDS, KINDS, save_gemma4, save_kimi, save_target
from tests.engine.tokens import name_tokens
from tests.speculators import rewrite_in_that_layout

PAIR = demo_pair("dense")
SLIDING_WINDOW = 96


def _demo_draft_with(folder: Path, **fields: object) -> None:
    """The demo draft with other fields in its config."""
    shutil.copytree(PAIR.draft, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def short_draft(folder: Path) -> None:
    """It claims training on no more than 64 positions."""
    _demo_draft_with(folder, max_position_embeddings=64)


def mixed_draft(folder: Path) -> None:
    """Its first and last layer slide: two draft KV caches. In the layout of the speculators
    library, and without the last tokens of the vocabulary, which are special ones."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    _demo_draft_with(folder, layer_types=kinds, sliding_window=64, is_causal=False)
    (file,) = PAIR.target.glob("*.safetensors")
    rewrite_in_that_layout(folder, load_file(file)["model.embed_tokens.weight"], torch.arange(1000))


def sliding_draft(folder: Path) -> None:
    """All of its layers slide."""
    _demo_draft_with(folder, layer_types=["sliding_attention"] * 3, sliding_window=256)


def _as_dflash2(folder: Path, draft: Path, **changes: object) -> None:
    """A demo draft with a convolution and a selector, random and so weak that it still drafts."""
    raw = json.loads((draft / "config.json").read_text())
    own = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 16, "selector_top_k": 8}
    raw |= {"architectures": ["DFlash2DraftModel"], **changes}
    raw["dflash_config"] = {**raw["dflash_config"], **own}
    model, random = DraftModel(DraftConfig.from_dict(raw)), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "codebook" in name:
            torch.nn.init.normal_(parameter, std=0.5, generator=random)
        elif "projection" in name:
            torch.nn.init.normal_(parameter, std=0.02, generator=random)
        elif "base_kernel" in name:
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=random)
    model.load_state_dict(load_model(draft, dtype=torch.float32).state_dict(), strict=False)
    save_model(model, raw, folder, torch.float32)


def dflash2_draft(folder: Path) -> None:
    """Its first and last layer slide, too."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    changes = {"layer_types": kinds, "sliding_window": 64, "is_causal": False}
    _as_dflash2(folder, PAIR.draft, **changes)


def dflash2_hybrid_draft(folder: Path) -> None:
    _as_dflash2(folder, demo_pair("hybrid").draft)


def overflowing_draft(folder: Path) -> None:
    """The demo draft with a finite weight that makes every logit overflow."""
    shutil.copytree(PAIR.draft, folder, dirs_exist_ok=True)
    rewrite(folder, lambda tensors: tensors["norm.weight"].fill_(3e38))


def config_only(folder: Path) -> None:
    """The demo pair without weights."""
    shutil.copytree(
        PAIR.target.parent,
        folder,
        ignore=shutil.ignore_patterns("*.safetensors"),
        dirs_exist_ok=True,
    )


def sliding(folder: Path) -> None:
    """The demo target with every second layer sliding, as gpt-oss has them: the architecture is one
    for which SGLang keeps two KV pools, and whose dense layers are Qwen3's."""
    shutil.copytree(PAIR.target, folder, dirs_exist_ok=True)
    raw = json.loads((PAIR.target / "config.json").read_text())
    depth = raw["num_hidden_layers"]
    changed = {
        "architectures": ["LagunaForCausalLM"],
        "model_type": "laguna",
        "layer_types": ["sliding_attention", "full_attention"] * (depth // 2),
        "mlp_layer_types": ["dense"] * depth,
        "sliding_window": SLIDING_WINDOW,
        "gating": "disabled",
        "rope_parameters": {"full_attention": raw["rope_parameters"]},
    }
    (folder / "config.json").write_text(json.dumps({**raw, **changed}))
    # That class has an lm_head of its own in any case.
    _untie(folder)


def _untie(folder: Path) -> None:
    """Give a target an lm_head of its own, with the values of the embedding."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": False}))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})


# Tokens of the demo target by their text -> what they are written as. In its answers this makes
# calls of tools inside a block, with and without arguments, reasoning, and halves of a character.
OTHER_TEXTS = {
    "de": b"<tool_call>\n",
    "e": b'{"name": "get_time", ',
    "p": b'"arguments": {',
    "co": b"}",
    "py": b"}\n",
    "_": b"</tool_call>",
    "ri": b"<tool_call>\n",
    "or": b'{"name": "search", ',
    "ity": b'"arguments": {"text": "',
    "kwargs": b'"}}',
    ")\n\n": b"\n</tool_call>",
    "def": b"<think>",
    "):\n": b"</think>",
    "at": "€".encode()[:2],
    "o": "€".encode()[2:],
}


def other_texts(folder: Path) -> None:
    """The demo target whose tokenizer writes some tokens otherwise, and reads them as before. A
    chat is the text of its messages."""
    shutil.copytree(PAIR.target, folder, dirs_exist_ok=True)
    raw = json.loads((folder / "tokenizer.json").read_text())
    decoders = [raw["decoder"]]
    for text, other in OTHER_TEXTS.items():
        exactly = {"Regex": f"^{re.escape(_byte_level(text.encode()))}$"}
        decoders.insert(0, {"type": "Replace", "pattern": exactly, "content": _byte_level(other)})
    raw["decoder"] = {"type": "Sequence", "decoders": decoders}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _byte_level(text: bytes) -> str:
    """Bytes as the vocabulary writes them: as they are if they can be printed, else one by one from
    character 256 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("ÿ") + 1)]
    printed.remove(0xAD)
    others = [byte for byte in range(256) if byte not in printed]
    return "".join(chr(256 + others.index(b)) if b in others else chr(b) for b in text)


def quantized_draft(folder: Path, name: str) -> None:
    """The demo draft by that exporter, and beside it the same values as plain weights."""
    from tests.quantized_checkpoints import EXPORTERS  # It takes two seconds to load.

    EXPORTERS[name].write(PAIR.draft, folder / "quantized", folder / "plain")


def quantized_target(folder: Path, name: str) -> None:
    """The demo target by that exporter, and beside it the same values as plain weights. Its lm_head
    is not the embedding."""
    from tests.quantized_checkpoints import TARGETS

    source, made = folder / "source", (folder / "quantized", folder / "plain")
    shutil.copytree(PAIR.target, source)
    _untie(source)
    TARGETS[name].write(source, *made)
    for path in made:
        for file in source.iterdir():
            if not (path / file.name).exists():
                shutil.copy(file, path)


def hybrid_draft(folder: Path) -> None:
    """A random draft, with sliding layers like Qwen3.6-27B's."""
    raw = raw_config(
        hidden_size=SHAPE["hidden_size"],
        vocab_size=SHAPE["vocab_size"],
        num_target_layers=4,
        block_size=BLOCK_SIZE,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=32,
        dflash_config={"mask_token_id": 1023, "target_layer_ids": [0, 1, 2]},
    )
    torch.manual_seed(0)
    save_model(random_model(raw), raw, folder, torch.float32)


def adapter(folder: Path) -> None:
    """Random, of rank 4, in the embedding and every projection: strong enough to change outputs."""
    shapes = json.loads((PAIR.target / "config.json").read_text())
    hidden, inner, head = shapes["hidden_size"], shapes["intermediate_size"], shapes["head_dim"]
    queries, keys = shapes["num_attention_heads"] * head, shapes["num_key_value_heads"] * head
    sizes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    random, rank = torch.Generator().manual_seed(0), 4
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(shapes["num_hidden_layers"]):
        for name, (before, after) in sizes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            down = torch.randn(rank, before, generator=random) / before**0.5
            up = torch.randn(after, rank, generator=random) / 2
            tensors |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
    key = "base_model.model.model.embed_tokens"
    tensors[f"{key}.lora_embedding_A"] = torch.randn(rank, shapes["vocab_size"], generator=random)
    tensors[f"{key}.lora_embedding_B"] = torch.randn(hidden, rank, generator=random) / 50
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["embed_tokens", *(name.split(".")[1] for name in sizes)],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


# Tokens of the demo target, and their texts for a model that thinks: it writes the first often.
THOUGHTS = {327: "</think>", 707: "<think>", 336: "<tool_call>", 378: "</tool_call>"}


def thinking(folder: Path) -> None:
    """The demo target with other texts for some tokens: its drafts stay as good."""
    shutil.copytree(PAIR.target, folder, dirs_exist_ok=True)
    name_tokens(folder, THOUGHTS)


# The first folder of a path after `{files}` -> what fills it.
MAKERS: dict[str, Callable[[Path], None]] = {
    "short-draft": short_draft,
    "mixed-draft": mixed_draft,
    "sliding-draft": sliding_draft,
    "dflash2-draft": dflash2_draft,
    "dflash2-hybrid-draft": dflash2_hybrid_draft,
    "overflowing-draft": overflowing_draft,
    "config-only": config_only,
    "sliding": sliding,
    "other-texts": other_texts,
    "hybrid": save_random_hybrid,
    "hybrid-moe": functools.partial(save_random_hybrid, kind="Qwen3_5Moe"),
    "hybrid-next": functools.partial(save_random_hybrid, kind="Qwen3Next"),
    "hybrid-seeing": save_seeing_hybrid,
    "hybrid-draft": hybrid_draft,
    **{
        f"draft-{name}": functools.partial(quantized_draft, name=name)
        for name in ("W4A16-zero-points", "FP8", "ModelOpt-NVFP4", "AWQ")
    },
    "target-NVFP4": functools.partial(quantized_target, name="NVFP4"),
    **{f"target-{kind}": functools.partial(save_target, name=kind) for kind in KINDS},
    **{f"target-{kind}": functools.partial(save_gemma4, name=kind) for kind in GEMMA4_KINDS},
    "kimi": save_kimi,
    "adapter": adapter,
    "thinking": thinking,
}
