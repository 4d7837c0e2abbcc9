"""Whatever a draft's files hold, they are read or refused in one line, at once."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.draft_keys import FOREIGN, TRAINING, read_keys
from sglang_dflash.checkpoint.fields import read_json_object
from sglang_dflash.checkpoint.published import ModelFacts
from sglang_dflash.checkpoint.stored import INDEX, local_weight_bytes
from sglang_dflash.checkpoint.tensors import check_weights, expected_tensors
from sglang_dflash.common.errors import ConfigError, UnsupportedDraft
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.rope import Rotary
from sglang_dflash.drafting.weights import save_model
from sglang_dflash.tools.inspect.report import inspect
from sglang_dflash.tools.inspect.serving import Serving
from sglang_dflash.tools.inspect.table import as_table
from tests.checkpoint.target_fields import TARGET
from tests.conftest import FUZZ, random_model, raw_config

# Of this process: the machine may be busy with other things.
SECONDS = 3.0
bounded = settings(
    max_examples=80 * FUZZ,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

ODD_NUMBERS = [0, -1, 1, 2, 3, 2**31, 2**63, 10**400, 0.5, 1e-320, 1e308, float("nan"), -0.0]
scalars = (
    st.none()
    | st.booleans()
    | st.sampled_from([*ODD_NUMBERS, float("inf"), "", "silu", "yarn", "full_attention", "false"])
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
ROPE = ("factor", "rope_type", "type", "rope_theta", "beta_fast", "mscale", "truncate",
        "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
        "partial_rotary_factor", "mrope_section")  # fmt: skip
# Keys of Transformers, of any model.
GENERIC = (
    "_name_or_path", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "id2label", "initializer_range", "is_decoder", "num_labels", "output_hidden_states",
    "pad_token_id", "problem_type", "return_dict", "temperature", "text_config",
    "tie_word_embeddings", "tokenizer_class", "top_k", "torch_dtype", "transformers_version",
    "use_cache",
)  # fmt: skip
KEYS = sorted({*read_keys(), *FOREIGN, *TRAINING, *GENERIC, "no_such_key"})
PATHS = [
    *((name,) for name in KEYS),
    *(("dflash_config", name) for name in KEYS),
    *(("rope_scaling", name) for name in ROPE),
]
KINDS: list[Any] = [None, "linear", "llama3", "yarn"]
changes = st.lists(st.tuples(st.sampled_from(PATHS), values), min_size=1, max_size=3)
extremes = st.dictionaries(
    st.sampled_from(
        ["factor", "rope_theta", "low_freq_factor", "original_max_position_embeddings"]
    ),
    st.sampled_from([1e-320, 1e-30, 1e-9, 1e-3, 0.5, 1, 1.001, 2, 1e9, 1e15, 1e30, 1e308]),
    max_size=3,
)


@pytest.fixture(scope="module", autouse=True)
def _torch_is_complete() -> None:
    """It imports 800 modules for the first tensor on "meta", which takes seconds."""
    with torch.device("meta"):
        torch.nn.Linear(1, 1)


def in_one_line(read: Callable[[], Any]) -> Any:
    """Return `read`'s result, None if it refuses; any other error and a delay are failures."""
    began = time.process_time()
    try:
        return read()
    except ConfigError as error:
        assert "\n" not in str(error) and 0 < len(str(error)) < 700
        return None
    finally:
        assert time.process_time() - began < SECONDS


def changed(kind: Any, made: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    raw = copy.deepcopy(raw_config())
    if kind is not None:
        raw["rope_scaling"] = {"rope_type": kind, "factor": 4.0}
    if kind == "llama3":
        raw["rope_scaling"] |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for path, value in made:
        *above, name = path
        place = raw
        for part in above:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                break
        else:
            place[name] = value
    return raw


@bounded
@given(kind=st.sampled_from(KINDS), made=changes)
def test_any_config_is_read_or_refused(kind: Any, made: Any) -> None:
    read_or_refused(changed(kind, made))


@bounded
@given(kind=st.sampled_from(KINDS[1:]), extreme=extremes)
def test_any_rotary_embedding_is_finite_or_refused(kind: Any, extreme: dict[str, float]) -> None:
    names = {
        "llama3": ("beta_fast", "mscale"),
        "linear": ("beta_fast", "mscale", "low_freq_factor"),
    }
    for name in names.get(kind, ("low_freq_factor",)):
        extreme.pop(name, None)
    read_or_refused(changed(kind, [(("rope_scaling", name), x) for name, x in extreme.items()]))


def read_or_refused(raw: dict[str, Any]) -> None:
    def use() -> DraftConfig:
        config = DraftConfig.from_dict(raw)
        expected_tensors(config)
        Options().resolve(config)
        with torch.device("meta"):
            model = DraftModel(config)
        assert model.config is config
        return config

    config = in_one_line(use)
    if config is not None:
        rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings)
        assert rotary.frequencies.isfinite().all() and 0 < rotary.attention_factor < 1e12
    worker = in_one_line(lambda: inspected_worker(raw, config))
    assert (config is None) == (worker in (None, "builtin"))


def inspected_worker(raw: dict[str, Any], config: DraftConfig | None) -> str:
    """The worker that `sglang-dflash inspect` names, with a target that fits and room for it."""
    target = dict(TARGET)
    if config is not None:
        target["hidden_size"], target["vocab_size"] = config.hidden_size, config.vocab_size
        target["num_hidden_layers"] = config.num_target_layers or config.target_layer_ids[-1] + 1
    of_target, of_draft = (ModelFacts("x", given, None, "a test") for given in (target, raw))
    found = inspect(of_target, of_draft, Options(), Serving(kv_memory_gib=1e12))
    assert json.dumps(found) and as_table(found)
    return found["worker"]


@bounded
@given(data=st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode()))
def test_any_file_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_bytes(data)
    in_one_line(lambda: DraftConfig.from_dict(read_json_object(tmp_path / "config.json", "draft")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("draft")
    torch.manual_seed(0)
    save_model(random_model(raw_config()), raw_config(), made, torch.float32)
    return made


@pytest.fixture(scope="module")
def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def checked(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    config = DraftConfig.from_dict(raw_config())
    in_one_line(lambda: check_weights(config, folder))


DTYPES = ["F32", "BF16", "F16", "F64", "BOOL", "I8", "U16", "F8_E4M3", "F4", "C64", "X", ""]
numbers = st.integers(-1, 70) | st.sampled_from([2**31, 2**63, 2**64, 10**30])
of_tensors = (
    st.tuples(st.just("dtype"), st.sampled_from(DTYPES) | values)
    | st.tuples(st.just("shape"), st.lists(numbers, max_size=3) | values)
    | st.tuples(st.just("data_offsets"), st.lists(numbers, max_size=3) | values)
    | st.tuples(st.text(max_size=3), values)
)


@bounded
@given(
    made=st.lists(st.tuples(st.integers(0, 40), of_tensors), min_size=1, max_size=3),
    metadata=st.none() | values,
)
def test_any_header_is_read_or_refused(
    folder: Path, weights: bytes, made: Any, metadata: Any
) -> None:
    size = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]
    for which, (field, value) in made:
        header[names[which % len(names)]][field] = value
    if metadata is not None:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    checked(folder, len(text).to_bytes(8, "little") + text + weights[8 + size :])


@bounded
@given(
    at=st.lists(st.integers(0, 3000), max_size=4),
    byte=st.integers(0, 255),
    end=st.none() | st.integers(0, 3000),
)
def test_any_bytes_are_read_or_refused(
    folder: Path, weights: bytes, at: list[int], byte: int, end: int | None
) -> None:
    """Bytes of the header's length, of the header and of the first values."""
    data = bytearray(weights)
    for place in at:
        data[place] = byte
    checked(folder, bytes(data[:end]))


@bounded
@given(
    index=values
    | st.fixed_dictionaries({"weight_map": values, "metadata": values})
    | st.fixed_dictionaries({"metadata": st.fixed_dictionaries({"total_size": values})})
)
def test_any_index_is_read_or_refused(folder: Path, weights: bytes, index: Any) -> None:
    (folder / INDEX).write_text(json.dumps(index))
    checked(folder, weights)
    in_one_line(lambda: local_weight_bytes("draft", folder))
    (folder / INDEX).unlink()


def test_the_fuzzed_config_is_read_without_changes() -> None:
    for kind in KINDS:
        DraftConfig.from_dict(changed(kind, []))
    with pytest.raises(UnsupportedDraft):
        DraftConfig.from_dict(changed("dynamic", []))
