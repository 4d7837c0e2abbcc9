"""Drafts that no worker can serve: what is broken, and a part of the message that refuses it.

Shared by the tests of `sglang-dflash inspect`, of `generate` and of servers, which refuse every one
of them with the same line.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_dflash.common.errors import shown
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.conftest import rewrite

PAIR = demo_pair("dense")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q, K = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"
UP, NORM = "layers.0.mlp.up_proj.weight", "norm.weight"


def server_flags(*more: str, target: object = PAIR.target, draft: object = PAIR.draft) -> list[str]:
    """Return the flags of a DFLASH server for the demo pair; `draft`: None leaves its flag out.
    The last one of a repeated flag counts."""
    given = () if draft is None else ("--speculative-draft-model-path", str(draft))
    return ["--model-path", str(target), "--speculative-algorithm", "DFLASH", *given, *more]


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
        raw["dflash_config"] = {**raw["dflash_config"], **(own or {})}
        file.write_text(json.dumps(raw))

    return change


def invalid(path: str, value: Any, beside: Mapping[str, Any]) -> BrokenDraft:
    """A field of that dotted path with that value; `beside`: other fields of config.json."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        raw = {**json.loads(file.read_text()), **copy.deepcopy(dict(beside))}
        *above, name = path.split(".")
        place = raw
        for part in above:
            place = place.setdefault(part, {})
        place[name] = value
        file.write_text(json.dumps(raw))

    found = "missing" if value is None else shown(value)
    return BrokenDraft(change, f"{path} in the draft's config.json: {found}; ")


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, change)


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


def put(name: str, of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """Another tensor by that name, of the one that is there."""
    return tensors(lambda t: t.update({name: of(t[name])}))


def index(raw: Any) -> Callable[[Path], object]:
    return content(json.dumps(raw).encode(), INDEX)


_TARGET_CONFIG = (PAIR.target / "config.json").read_bytes()
_NAN, _INF = float("nan"), float("inf")
_NESTED = 100_000 * b"[" + 100_000 * b"]"
_NO_JSON = "config.json'; cannot be read as JSON ("

FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "list": (content(b"[]"), "an object of fields is required, it holds []"),
    "null": (content(b"null"), "an object of fields is required, it holds None"),
    "empty": (content(b""), f"{_NO_JSON}Expecting value"),
    "cut": (content(b'{"hidden_size": 19'), _NO_JSON),
    "not UTF-8": (content(b'{"\xff": 1}'), f"{_NO_JSON}'utf-8' codec"),
    "UTF-16": (content('{"a": 1}'.encode("utf-16")), _NO_JSON),
    "nested": (content(_NESTED), f"{_NO_JSON}maximum recursion depth"),
    "nested field": (content(b'{"hidden_size": ' + _NESTED + b"}"), _NO_JSON),
    "digits": (content(b'{"hidden_size": ' + 5000 * b"9" + b"}"), f"{_NO_JSON}Exceeds the"),
    "no file": (lambda folder: (folder / "config.json").unlink(), "no config.json in it"),
    "a folder": (instead("config.json", Path.mkdir), "no config.json in it"),
    "long": (content(b'{"auto_map": "' + 2**20 * b"x" + b'"}'), "more than 1048576 bytes; no conf"),
    "a pipe": (
        lambda folder: os.mkfifo(folder / "hf_quant_config.json"),
        "json'; a pipe, a socket",
    ),
    "a dangling link": (
        instead("config.json", lambda path: path.symlink_to("nowhere")),
        "no config.json in it",
    ),
    "a target's": (content(_TARGET_CONFIG), "neither dflash_config nor num_target_layers"),
}

# Dotted path -> values that are refused. None stands for a field that is missing.
INVALID: dict[str, list[Any]] = {
    "dflash_config": [[1], False],
    "rope_scaling": ["yarn", []],
    "rope_parameters": [3],
    "rope_scaling.rope_type": [["yarn"]],
    "rope_parameters.type": [1.5],
    "rope_theta": ["1e6", 0, 1e300, _INF],
    "partial_rotary_factor": ["half", [1], _NAN, 2],
    "rope_parameters.partial_rotary_factor": ["x"],
    "rope_is_neox_style": ["no"],
    "layer_types": ["full_attention", {"0": "x"}, [0, 0, 0], ["full_attention"]],
    "rms_norm_eps": ["1e-6", [1e-6], _NAN, -1, 0, 1e30, True, 10**400],
    "is_causal": ["no", 0],
    "attention_bias": ["false"],
    "rope_scaling.factor": [None],
    "use_sliding_window": ["no"],
    "hidden_act": [["silu"]],
    "architectures": ["DFlash", [None], None],
    "model_type": [3, None],
    "num_hidden_layers": [100_000, 0, True],
    "head_dim": [1, 63, 0, "64"],
    "num_attention_heads": [2**40],
    "num_key_value_heads": [3],
    "hidden_size": [256, 192.0, None],
    "intermediate_size": [2**31],
    "vocab_size": [2048],
    "max_position_embeddings": ["x"],
    "num_target_layers": [12],
    "dflash_config.mask_token_id": [-1, True],
    "dflash_config.target_layer_ids": [
        [1, 3, 3], [True, 3, 4], [4, 3, 1], [1, 3, 6], [], "134",
    ],
    "block_size": [1, 0, "8", 99999999999, 40_000, 100_000 * "8"],
    "dflash_config.block_size": [8.5],
}  # fmt: skip
# What the draft does not need, and SGLang or Transformers cannot read: only a server refuses it.
ONLY_SGLANG: dict[str, list[Any]] = {
    "text_config": ["x", [], {}],
    "quantization_config": ["fp8"],
    "quantization_config.quant_method": [None, 3],
    "auto_map": ["x", [1]],
    "attention_dropout": ["much", [0.1]],
    "initializer_range": [1, "x"],
    "use_cache": ["yes"],
    "tie_word_embeddings": [0],
    "max_window_layers": [1.5],
    "num_labels": ["2"],
    "bos_token_id": [[1]],
    "pad_token_id": [1.5],
    "eos_token_id": ["x"],
    "id2label": [["a"]],
    "dtype": ["float7"],
    "torch_dtype": ["", []],
    "thinker_config": [{}],
}  # fmt: skip
# Of `INVALID`, beside other fields.
SLIDING = {"layer_types": 3 * ["sliding_attention"]}
LINEAR, YARN = ({"rope_scaling": {"rope_type": kind, "factor": 8}} for kind in ("linear", "yarn"))
_BAND = {"low_freq_factor": 4.0, "high_freq_factor": 8.0}
LLAMA3 = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **_BAND}}
BESIDE: list[tuple[Mapping[str, Any], str, list[Any]]] = [
    (SLIDING, "sliding_window", ["512", None]),
    (
        {"use_sliding_window": True, "sliding_window": 512},
        "max_window_layers",
        ["28", 1.5, [1], {}],
    ),
    (LINEAR, "rope_scaling.factor", ["2", 0, -8.0, True, _NAN, 1e-300]),
    (YARN, "rope_scaling.factor", [None]),
    (YARN, "rope_scaling.original_max_position_embeddings", [0]),
    (YARN, "rope_scaling.attention_factor", [0.0]),
    (YARN, "rope_scaling.mscale", [-1.0]),
    (YARN, "rope_scaling.truncate", ["no"]),
    (LLAMA3, "rope_scaling.high_freq_factor", [1.0, 4.0]),
    (LLAMA3, "rope_scaling.low_freq_factor", [None]),
    ({"logit_scale": 2.0}, "architectures", [{"": None}]),
]

FIELDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "one layer more": (fields(num_hidden_layers=4), "tensor layers.3.self_attn.q_proj.weight"),
    "mask token": (
        fields(own={"mask_token_id": 5000}),
        "mask_token_id in the draft's config.json: 5000; a token of the vocabulary of 1024",
    ),
    "code": (
        fields(auto_map={"AutoModel": "dflash.DFlash", "AutoConfig": "configuration.Draft"}),
        "auto_map.AutoConfig in the draft's config.json: 'configuration.Draft'; code of a draft",
    ),
    "code beside another head": (
        fields(auto_map={"AutoTokenizer": ["x.Y", None]}, markov_rank=4),
        "auto_map.AutoTokenizer in the draft's config.json: ['x.Y', None]; code of a draft",
    ),
    "layer ids fewer": (fields(own={"target_layer_ids": [1, 3]}), "fc.weight of the draft: [192,"),
    "block of half the context": (
        fields(block_size=20_000),
        "block_size of the draft: 20000; more than half of the target's context of 32768 tokens",
    ),
}

# Of the weights file and its index.
SHARDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (instead(WEIGHTS, os.mkfifo), "model.safetensors'; a pipe, a socket or a device"),
    "a folder": (instead(WEIGHTS, Path.mkdir), "model.safetensors'; a folder; a safetensors"),
    "a dangling link": (
        instead(WEIGHTS, lambda path: path.symlink_to("nowhere")),
        "model.safetensors'; a link to a file that is not there",
    ),
    **{
        what: (breaks, "model.safetensors'; truncated or damaged (")
        for what, breaks in {
            "empty": cut(0),
            "cut header": cut(4),
            "cut data": cut(-100),
            "header of text": content(b"{" * 4000, WEIGHTS),
            "header of a length": content(b"\xff" * 8 + b"{}", WEIGHTS),
            "no JSON": content((2).to_bytes(8, "little") + b"[]", WEIGHTS),
        }.items()
    },
    "pickles": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        "only pytorch_model.bin; weights are read from safetensors files",
    ),
    "index of a shard": (
        index({"weight_map": {Q: "model-00002.safetensors"}}),
        "model.safetensors.index.json names 'model-00002.safetensors'; download",
    ),
    "index list": (index([]), "index.json'; an object of fields is required, it holds []"),
    "index map": (index({"weight_map": [Q]}), "weight_map of model.safetensors.index.json: ['lay"),
    "index names": (index({"weight_map": {Q: 3}}), "an object of tensor names and file names is"),
    "index metadata": (index({"metadata": [1]}), "metadata of model.safetensors.index.json: [1]"),
    "two files": (
        lambda folder: shutil.copy(folder / WEIGHTS, folder / "second.safetensors"),
        "in two files, the second is second.safetensors",
    ),
    "twice": (
        tensors(lambda t: t.update({"model.fc.weight": t["fc.weight"].clone()})),
        "'fc.weight'; twice in model.safetensors, under two spellings",
    ),
    "extra": (
        tensors(lambda t: t.update(extra=torch.zeros(1))),
        "'extra'; no draft of this config has this tensor",
    ),
    "missing": (tensors(lambda t: t.pop(Q)), f"tensor {Q} of the draft: missing"),
}

_ZEROS = "all zeros; trained weights are required"
# What is wrong with one tensor, its name, how it becomes so, and what is said of it.
VALUES: list[tuple[str, str, Callable[[Path], object], str]] = [
    ("misshapen", Q, put(Q, lambda t: t[:-1]), "[255, 192]; the config asks for [256, 192]"),
    ("scalar", NORM, put(NORM, lambda t: torch.tensor(1.0)), "[]; the config asks for [192]"),
    ("no element", NORM, put(NORM, lambda t: t[:0]), "[0]; the config asks for [192]"),
    ("transposed", UP, put(UP, lambda t: t.T), "[192, 768]; the config asks for [768, 192]"),
    ("int8", Q, put(Q, lambda t: t.to(torch.int8)), "'I8'; one of BF16, F16, F32, F64 is required"),
    ("bool", Q, put(Q, lambda t: t > 0), "'BOOL'; one of BF16"),
    ("int64 norm", NORM, put(NORM, torch.Tensor.long), "'I64'; one of BF16"),
    ("float8", Q, put(Q, lambda t: t.to(torch.float8_e4m3fn)), "'F8_E4M3'; one of BF16"),
    ("all NaN", Q, put(Q, lambda t: t * _NAN), "49152 of 49152 values are NaN or infinite"),
    ("one NaN", UP, one_value(UP, _NAN), "1 of 147456 values are NaN or infinite; finite ones"),
    ("NaN norm", NORM, one_value(NORM, _NAN), "1 of 192 values are"),
    ("Inf", "fc.weight", one_value("fc.weight", _INF), "1 of 110592 values are"),
    ("-Inf", K, one_value(K, -_INF), "1 of 24576 values are"),
    ("Inf float16", Q, one_value(Q, _INF, torch.float16), "1 of 49152"),
    ("NaN float32", Q, one_value(Q, _NAN, torch.float32), "1 of 49152"),
    ("NaN float64", Q, one_value(Q, _NAN, torch.float64), "1 of 49152"),
    ("zero matrix", UP, put(UP, torch.zeros_like), _ZEROS),
    ("zero norm", NORM, put(NORM, torch.zeros_like), _ZEROS),
    ("negative zeros", K, put(K, lambda t: -torch.zeros_like(t)), _ZEROS),
]
TENSORS = SHARDS | {
    what: (breaks, f"{name} of the draft: {told}") for what, name, breaks, told in VALUES
}

BROKEN: dict[str, BrokenDraft] = {
    f"{kind}: {what}": BrokenDraft(breaks, message)
    for kind, table in {"file": FILES, "field": FIELDS, "tensors": TENSORS}.items()
    for what, (breaks, message) in table.items()
} | {
    f"field: {path}={json.dumps(value)[:12]}": invalid(path, value, beside)
    for beside, path, refused in [*(({}, *each) for each in INVALID.items()), *BESIDE]
    for value in refused
}
