"""Drafts that no worker can serve: what is broken, and a part of the message that refuses it.

Shared by the tests of `sglang-dflash inspect`, of `generate` and of servers, which refuse every one
of them with the same line.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.facts.embedded import demo_pair

PAIR = demo_pair("dense")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q, K = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"
UP = "layers.0.mlp.up_proj.weight"
_ABSENT = object()


@dataclass(frozen=True)
class BrokenDraft:
    """A way to break a copy of the demo draft, and a part of the message, the same everywhere."""

    breaks: Callable[[Path], object]
    message: str

    def make(self, folder: Path) -> Path:
        """Write the broken draft to `folder`, which does not exist yet."""
        shutil.copytree(PAIR.draft, folder)
        self.breaks(folder)
        return folder


def content(data: bytes, file: str = "config.json") -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(data)


def fields(own: Mapping[str, Any] | None = None, **changes: Any) -> Callable[[Path], None]:
    """Changes of config.json, and with `own` of its dflash_config."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        raw = {**json.loads(file.read_text()), **changes}
        if own is not None:
            raw["dflash_config"] = {**raw["dflash_config"], **own}
        raw = {name: value for name, value in raw.items() if value is not _ABSENT}
        file.write_text(json.dumps(raw))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        loaded = load_file(folder / WEIGHTS)
        change(loaded)
        save_file({name: t.contiguous() for name, t in loaded.items()}, folder / WEIGHTS)

    return rewrite


def one_value(name: str, value: float, dtype: torch.dtype | None = None) -> Callable[[Path], None]:
    """The last element of a tensor is `value`; all tensors are of `dtype`."""

    def change(loaded: dict[str, torch.Tensor]) -> None:
        for each in loaded if dtype is not None else ():
            loaded[each] = loaded[each].to(dtype)
        loaded[name].view(-1)[-1] = value

    return tensors(change)


def cut(size: int) -> Callable[[Path], object]:
    """The weights file cut to `size` bytes, or by `-size`."""

    def truncate(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:size])

    return truncate


def instead(file: str, put: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else in place of a file."""

    def replace(folder: Path) -> None:
        (folder / file).unlink()
        put(folder / file)

    return replace


def swap(first: str, second: str) -> Callable[[Path], None]:
    return tensors(lambda t: t.update({first: t[second], second: t[first]}))


def index(raw: Any) -> Callable[[Path], object]:
    return content(json.dumps(raw).encode(), INDEX)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def _linear(**changes: Any) -> Callable[[Path], None]:
    return fields(rope_scaling={"rope_type": "linear", "factor": 2.0, **changes})


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}
_TARGET_CONFIG = (PAIR.target / "config.json").read_bytes()

FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "list": (content(b"[]"), "config.json' holds no JSON object but []"),
    "null": (content(b"null"), "config.json' holds no JSON object but None"),
    "string": (content(b'"draft"'), "config.json' holds no JSON object but 'draft'"),
    "number": (content(b"8"), "config.json' holds no JSON object but 8"),
    "empty": (content(b""), "config.json' is not valid JSON (Expecting value"),
    "cut": (content(b'{"hidden_size": 19'), "config.json' is not valid JSON ("),
    "not UTF-8": (content(b'{"\xff": 1}'), "config.json' is not valid JSON ('utf-8' codec"),
    "UTF-16": (content('{"a": 1}'.encode("utf-16")), "config.json' is not valid JSON ("),
    "nested": (content(nested(100_000)), "config.json' is not valid JSON (nested too deeply)"),
    "nested field": (
        content(b'{"hidden_size": ' + nested(100_000) + b"}"),
        "config.json' is not valid JSON (nested too deeply)",
    ),
    "digits": (content(b'{"hidden_size": ' + 5000 * b"9" + b"}"), "not valid JSON (Exceeds the"),
    "no file": (lambda folder: (folder / "config.json").unlink(), "no config.json in '"),
    "a folder": (instead("config.json", Path.mkdir), "no config.json in '"),
    "a dangling link": (
        instead("config.json", lambda path: path.symlink_to("nowhere")),
        "no config.json in '",
    ),
    "a target's": (content(_TARGET_CONFIG), "no DFlash draft: its config.json has neither"),
}

FIELDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "dflash_config list": (fields(dflash_config=[1]), "dflash_config: [1] in the draft's"),
    "dflash_config false": (fields(dflash_config=False), "dflash_config: False in the draft's"),
    "text_config": (fields(text_config="x"), "text_config: 'x' in the draft's config.json; an ob"),
    "text_config empty": (fields(text_config=[]), "text_config: [] in the draft's config.json; an"),
    "rope_scaling": (fields(rope_scaling="yarn"), "rope_scaling: 'yarn' in the draft's"),
    "rope_scaling list": (fields(rope_scaling=[]), "rope_scaling: [] in the draft's"),
    "rope_parameters": (fields(rope_parameters=3), "rope_parameters: 3 in the draft's"),
    "rope_type list": (
        fields(rope_scaling={"rope_type": ["yarn"]}),
        "rope_scaling.rope_type: ['yarn'] in the draft's config.json; a name",
    ),
    "rope type number": (
        fields(rope_parameters={"type": 1.5}),
        "rope_parameters.type: 1.5 in the draft's config.json; a name",
    ),
    "factor text": (_linear(factor="2"), "rope_scaling.factor: '2' in the draft's"),
    "factor 0": (_linear(factor=0), "rope_scaling.factor: 0 in the draft's"),
    "factor NaN": (_linear(factor=float("nan")), "rope_scaling.factor: nan in the draft's"),
    "factor tiny": (_linear(factor=1e-300), "a number from 1e-09 to 1e+09 is required"),
    "factor missing": (
        fields(rope_scaling={"rope_type": "yarn"}),
        "rope_scaling.factor: missing from the draft's",
    ),
    "llama3 band": (
        fields(rope_scaling=_LLAMA3),
        "rope_scaling.high_freq_factor: 1.0 is not above low_freq_factor (4.0)",
    ),
    "rope_theta text": (fields(rope_theta="1e6"), "rope_theta: '1e6' in the draft's"),
    "rope_theta 0": (fields(rope_theta=0), "rope_theta: 0 in the draft's"),
    "rope_theta huge": (fields(rope_theta=1e300), "rope_theta: 1e+300 in the draft's"),
    "rope_theta Infinity": (fields(rope_theta=float("inf")), "rope_theta: inf in the draft's"),
    "partial text": (fields(partial_rotary_factor="half"), "partial_rotary_factor: 'half' in the"),
    "partial list": (fields(partial_rotary_factor=[1]), "partial_rotary_factor: [1] in the"),
    "partial NaN": (fields(partial_rotary_factor=float("nan")), "partial_rotary_factor: nan in"),
    "partial 2": (fields(partial_rotary_factor=2), "partial_rotary_factor: 2 in the draft's"),
    "partial nested": (
        fields(rope_parameters={"rope_type": "default", "partial_rotary_factor": "x"}),
        "rope_parameters.partial_rotary_factor: 'x' in the draft's",
    ),
    "neox": (fields(rope_is_neox_style="no"), "rope_is_neox_style: 'no' in the draft's"),
    "layer_types text": (fields(layer_types="full_attention"), "layer_types: 'full_attention' in"),
    "layer_types object": (fields(layer_types={"0": "x"}), "layer_types: {'0': 'x'} in"),
    "layer_types numbers": (fields(layer_types=[0, 0, 0]), "layer_types: [0, 0, 0] in"),
    "layer_types short": (fields(layer_types=["full_attention"]), "layer_types: 1 entries for 3"),
    "sliding without window": (
        fields(layer_types=3 * ["sliding_attention"]),
        "sliding_window: None, but layer_types[0] is sliding_attention",
    ),
    "sliding_window text": (
        fields(layer_types=3 * ["sliding_attention"], sliding_window="512"),
        "sliding_window: '512' in the draft's",
    ),
    "eps text": (fields(rms_norm_eps="1e-6"), "rms_norm_eps: '1e-6' in the draft's"),
    "eps list": (fields(rms_norm_eps=[1e-6]), "rms_norm_eps: [1e-06] in the draft's"),
    "eps NaN": (fields(rms_norm_eps=float("nan")), "rms_norm_eps: nan in the draft's"),
    "eps -1": (fields(rms_norm_eps=-1), "rms_norm_eps: -1 in the draft's"),
    "eps 0": (fields(rms_norm_eps=0), "rms_norm_eps: 0 in the draft's"),
    "eps 1e30": (fields(rms_norm_eps=1e30), "rms_norm_eps: 1e+30 in the draft's config.json; a nu"),
    "eps true": (fields(rms_norm_eps=True), "rms_norm_eps: True in the draft's"),
    "eps digits": (fields(rms_norm_eps=10**400), "characters) in the draft's config.json; a numb"),
    "is_causal": (fields(is_causal="no"), "is_causal: 'no' in the draft's"),
    "is_causal 0": (fields(is_causal=0), "is_causal: 0 in the draft's"),
    "attention_bias": (fields(attention_bias="false"), "attention_bias: 'false' in the draft's"),
    "attention_sink_bias": (
        fields(attention_sink_bias="false"),
        "attention_sink_bias: 'false' in the draft's",
    ),
    "has_embed_tokens": (fields(has_embed_tokens="no"), "has_embed_tokens: 'no' in the draft's"),
    "quantization_config": (fields(quantization_config="fp8"), "quantization_config: 'fp8' in"),
    "hidden_act": (fields(hidden_act=["silu"]), "hidden_act: ['silu'] in the draft's"),
    "projector_type": (fields(own={"projector_type": 7}), "dflash_config.projector_type: 7 in"),
    "architectures": (fields(architectures="DFlash"), "architectures: 'DFlash' in the draft's"),
    "architectures, another head": (
        fields(architectures={"": None}, output_multiplier=2.0),
        "architectures: {'': None} in the draft's",
    ),
    "architectures list": (fields(architectures=[None]), "architectures: [None] in the draft's"),
    "model_type": (fields(model_type=3), "model_type: 3 in the draft's config.json; a name"),
    "layers": (fields(num_hidden_layers=100_000), "num_hidden_layers: 100000 in the draft's"),
    "layers 0": (fields(num_hidden_layers=0), "num_hidden_layers: 0 in the draft's"),
    "layers true": (fields(num_hidden_layers=True), "num_hidden_layers: True in the draft's"),
    "one layer more": (fields(num_hidden_layers=4), "tensor 'layers.3.self_attn.q_proj.weight'"),
    "head_dim 1": (fields(head_dim=1), "head_dim: 1 is odd"),
    "head_dim odd": (fields(head_dim=63), "head_dim: 63 is odd"),
    "head_dim 0": (fields(head_dim=0), "head_dim: 0 in the draft's"),
    "head_dim text": (fields(head_dim="64"), "head_dim: '64' in the draft's"),
    "heads": (fields(num_attention_heads=2**40), "num_attention_heads: 1099511627776 in the"),
    "heads that do not divide": (fields(num_key_value_heads=3), "num_key_value_heads: 3 does not"),
    "hidden_size": (fields(hidden_size=256), "hidden_size: the draft's is 256, the target's 192"),
    "hidden_size float": (fields(hidden_size=192.0), "hidden_size: 192.0 in the draft's"),
    "hidden_size absent": (fields(hidden_size=_ABSENT), "hidden_size: missing from the draft's"),
    "intermediate_size": (fields(intermediate_size=2**31), "intermediate_size: 2147483648 in the"),
    "vocab_size": (fields(vocab_size=2048), "vocab_size: the draft's is 2048, the target's 1024"),
    "positions": (fields(max_position_embeddings="x"), "max_position_embeddings: 'x' in the"),
    "num_target_layers": (fields(num_target_layers=12), "trained on 12 target layers, this target"),
    "no target layers": (fields(num_target_layers=_ABSENT), "num_target_layers: missing from the"),
    "mask token": (fields(own={"mask_token_id": 5000}), "mask_token_id: 5000 is outside the voc"),
    "mask token -1": (fields(own={"mask_token_id": -1}), "dflash_config.mask_token_id: -1 in the"),
    "mask token true": (fields(own={"mask_token_id": True}), "mask_token_id: True in the draft's"),
    "layer ids twice": (fields(own={"target_layer_ids": [1, 3, 3]}), "distinct layer ids in asc"),
    "layer ids true": (fields(own={"target_layer_ids": [True, 3, 4]}), "[True, 3, 4] in the draft"),
    "layer ids backwards": (fields(own={"target_layer_ids": [4, 3, 1]}), "[4, 3, 1] in the draft"),
    "layer ids outside": (fields(own={"target_layer_ids": [1, 3, 6]}), "[6] outside the target's"),
    "layer ids empty": (fields(own={"target_layer_ids": []}), "target_layer_ids: [] in the draft"),
    "layer ids text": (fields(own={"target_layer_ids": "134"}), "target_layer_ids: '134' in the"),
    "layer ids fewer": (fields(own={"target_layer_ids": [1, 3]}), "fc.weight [192, 576]; the conf"),
    "block 1": (fields(block_size=1), "block_size: 1 drafts nothing"),
    "block 0": (fields(block_size=0), "block_size: 0 in the draft's"),
    "block text": (fields(block_size="8"), "block_size: '8' in the draft's"),
    "block own": (fields(own={"block_size": 8.5}), "dflash_config.block_size: 8.5 in the draft's"),
    "block of digits": (fields(block_size=99999999999), "block_size: 99999999999 in the draft's"),
    "block of all positions": (
        fields(block_size=40_000),
        "block_size: 40000 is more than max_position_embeddings (32768)",
    ),
    "block of half the context": (
        fields(block_size=20_000),
        "block_size of the draft: 20000; more than half of the target's context of 32768 tokens",
    ),
    "long value": (fields(block_size=100_000 * "8"), "8888...8888"),
}

TENSORS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder": (instead(WEIGHTS, Path.mkdir), "model.safetensors' is a folder; a safetensors"),
    "a dangling link": (
        instead(WEIGHTS, lambda path: path.symlink_to("nowhere")),
        "model.safetensors' is a link to a file that is not there",
    ),
    "empty": (cut(0), "model.safetensors' is truncated or damaged ("),
    "cut header": (cut(4), "model.safetensors' is truncated or damaged ("),
    "cut data": (cut(-100), "model.safetensors' is truncated or damaged ("),
    "header of text": (content(b"{" * 4000, WEIGHTS), "is truncated or damaged ("),
    "header of a length": (content(b"\xff" * 8 + b"{}", WEIGHTS), "is truncated or damaged ("),
    "no JSON": (content((2).to_bytes(8, "little") + b"[]", WEIGHTS), "is truncated or damaged ("),
    "pickles": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        "only 'pytorch_model.bin'; weights are read from safetensors files",
    ),
    "index of a shard": (
        index({"weight_map": {Q: "model-00002.safetensors"}}),
        "model.safetensors.index.json names 'model-00002.safetensors', which is not in",
    ),
    "index list": (index([]), "index.json' holds no JSON object but []"),
    "index map": (index({"weight_map": [Q]}), "weight_map of model.safetensors.index.json: ['lay"),
    "index names": (index({"weight_map": {Q: 3}}), "an object of tensor names and file names is"),
    "index metadata": (index({"metadata": [1]}), "metadata of model.safetensors.index.json: [1]"),
    "two files": (
        lambda folder: shutil.copy(folder / WEIGHTS, folder / "second.safetensors"),
        "is in two files, the second is 'second.safetensors'",
    ),
    "missing": (tensors(lambda t: t.pop(Q)), f"tensor '{Q}' is missing"),
    "extra": (tensors(lambda t: t.update(extra=torch.zeros(1))), "the first is 'extra'"),
    "misshapen": (
        tensors(lambda t: t.update({Q: t[Q][:-1]})),
        f"{Q} [255, 192]; the config asks for [256, 192]",
    ),
    "scalar": (
        tensors(lambda t: t.update({"norm.weight": torch.tensor(1.0)})),
        "norm.weight []; the config asks for [192]",
    ),
    "no element": (
        tensors(lambda t: t.update({"norm.weight": torch.ones(0)})),
        "norm.weight [0]; the config asks for [192]",
    ),
    "q and k swapped": (swap(Q, K), f"{Q} [128, 192]; the config asks for [256, 192]"),
    "transposed": (
        tensors(lambda t: t.update({UP: t[UP].T})),
        f"{UP} [192, 768]; the config asks for [768, 192]",
    ),
    "int8": (
        tensors(lambda t: t.update({Q: t[Q].to(torch.int8)})),
        f"{Q} is of dtype I8; one of BF16, F16, F32, F64 is required",
    ),
    "bool": (tensors(lambda t: t.update({Q: t[Q] > 0})), f"{Q} is of dtype BOOL; one of BF16"),
    "int64 norm": (
        tensors(lambda t: t.update({"norm.weight": torch.ones(192, dtype=torch.int64)})),
        "norm.weight is of dtype I64; one of BF16",
    ),
    "float8": (
        tensors(lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)})),
        f"{Q} is of dtype F8_E4M3; one of BF16",
    ),
    "all NaN": (
        tensors(lambda t: t.update({Q: t[Q] * float("nan")})),
        f"{Q} holds 49152 of 49152 values that are NaN or infinite",
    ),
    "one NaN": (
        one_value(UP, float("nan")),
        f"{UP} holds 1 of 147456 values that are NaN or infinite; finite weights are required",
    ),
    "NaN norm": (one_value("norm.weight", float("nan")), "norm.weight holds 1 of 192 values that"),
    "Inf": (one_value("fc.weight", float("inf")), "fc.weight holds 1 of 110592 values that"),
    "-Inf": (one_value(K, float("-inf")), f"{K} holds 1 of 24576 values that"),
    "Inf float16": (one_value(Q, float("inf"), torch.float16), f"{Q} holds 1 of 49152"),
    "NaN float32": (one_value(Q, float("nan"), torch.float32), f"{Q} holds 1 of 49152"),
    "NaN float64": (one_value(Q, float("nan"), torch.float64), f"{Q} holds 1 of 49152"),
    "zero matrix": (
        tensors(lambda t: t[UP].zero_()),
        f"{UP} is all zeros; trained weights are required",
    ),
    "zero norm": (
        tensors(lambda t: t["hidden_norm.weight"].zero_()),
        "hidden_norm.weight is all zeros; trained weights are required",
    ),
    "negative zeros": (tensors(lambda t: t[K].zero_().neg_()), f"{K} is all zeros"),
}

BROKEN: dict[str, BrokenDraft] = {
    f"{kind}: {what}": BrokenDraft(breaks, message)
    for kind, table in {"file": FILES, "field": FIELDS, "tensors": TENSORS}.items()
    for what, (breaks, message) in table.items()
}
