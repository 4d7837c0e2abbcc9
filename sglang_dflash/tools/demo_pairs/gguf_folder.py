"""Conversion of a Llama GGUF to the folder that Hugging Face Transformers, SGLang and vLLM read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# GGUF's name of a layer's tensor -> its name in Transformers' Llama.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# GGUF's token type of control tokens, such as the end of a text.
CONTROL = 3


def convert(file: Path, folder: Path, progress: Callable[[float], None]) -> None:
    """Write config.json, generation_config.json, the tokenizer and bfloat16 weights into `folder`.

    Args:
        file: a GGUF of the architecture `llama`, with tied embeddings and a byte-level BPE
            tokenizer that splits digits (`smollm`).
        progress: called with the share of converted tensors.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    tensors, count = {}, len(reader.tensors)
    for done, tensor in enumerate(reader.tensors, 1):
        tensors[_name(tensor.name)] = _weight(tensor, config).to(torch.bfloat16)
        progress(done / count)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {**ends, "pad_token_id": config["pad_token_id"]})
    _tokenizer(fields, folder)


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    llama = {name.removeprefix("llama."): value for name, value in fields.items()}
    heads, width = llama["attention.head_count"], llama["embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # The file holds the float32 nearest to a decimal number.
        "rms_norm_eps": float(f"{llama['attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": llama["rope.freq_base"],
        "max_position_embeddings": llama["context_length"],
        "vocab_size": llama["vocab_size"],
        "tie_word_embeddings": True,
        "bos_token_id": llama["tokenizer.ggml.bos_token_id"],
        "eos_token_id": llama["tokenizer.ggml.eos_token_id"],
        "pad_token_id": llama["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _name(of_gguf: str) -> str:
    """Llama's name of a tensor."""
    if of_gguf == "token_embd.weight":
        return "model.embed_tokens.weight"
    if of_gguf == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = of_gguf.split(".")
    return f"model.layers.{layer}.{LAYER_TENSORS[part]}.weight"


def _weight(tensor: Any, config: dict[str, Any]) -> Tensor:
    from gguf import dequantize

    values = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
    part = tensor.name.split(".")[-2]
    if part in ("attn_q", "attn_k"):
        # RoPE rotates neighboring channels of a head in a GGUF, and its two halves in Transformers.
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        values = values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return values.contiguous()


def _tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    values = {name.removeprefix("tokenizer."): value for name, value in fields.items()}
    tokens = values["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in values["ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, token_type in zip(tokens, values["ggml.token_type"], strict=True)
        if token_type == CONTROL
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "bos_token": tokens[values["ggml.bos_token_id"]],
        "eos_token": tokens[values["ggml.eos_token_id"]],
        "unk_token": tokens[values["ggml.unknown_token_id"]],
        "pad_token": tokens[values["ggml.padding_token_id"]],
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": values["chat_template"],
    }
    _write(folder / "tokenizer_config.json", {**named, **settings})
