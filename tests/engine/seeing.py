"""The hybrid demo target as Qwen3.5 and Qwen3.6 are published: with a vision tower, here random."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file

from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.engine.hybrid import copy_tokenizer
from tests.engine.tokens import name_tokens

# Of the demo vocabulary, in place of its last tokens that are not special.
START, END, IMAGE, VIDEO = range(1016, 1020)
TEXTS = {
    START: "<|vision_start|>",
    END: "<|vision_end|>",
    IMAGE: "<|image_pad|>",
    VIDEO: "<|video_pad|>",
}
# Where a prompt has an image.
PLACE = TEXTS[START] + TEXTS[IMAGE] + TEXTS[END]
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
PROCESSOR = {
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 1024, "longest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
# A chat is the text of its messages, and their images.
CHAT = (
    "{% for one in messages %}{% if one['content'] is string %}{{ one['content'] }}{% else %}"
    "{% for part in one['content'] %}{{ part['text'] if part['type'] == 'text' else place }}"
    "{% endfor %}{% endif %}{% endfor %}"
).replace("place", f"'{PLACE}'")


def save_seeing_hybrid(folder: Path) -> None:
    """Write it. It continues texts as the demo target does."""
    import transformers

    pair = demo_pair("hybrid").target
    text = json.loads((pair / "config.json").read_text())
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [4, 2, 2]}
    config = transformers.Qwen3_5Config(
        text_config={key: text[key] for key in text if key != "architectures"},
        vision_config={**VISION, "out_hidden_size": text["hidden_size"]},
        vision_start_token_id=START,
        vision_end_token_id=END,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen3_5ForConditionalGeneration(config).float()
    (file,) = pair.glob("*.safetensors")
    inner = {f"model.language_{name}": tensor for name, tensor in load_file(file).items()}
    assert not model.load_state_dict(inner, strict=False).unexpected_keys
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.model.visual.named_parameters():
        mean = float("norm" in name and name.endswith("weight"))
        parameter.data.normal_(mean, 0.1, generator=generator)
    model.save_pretrained(folder)
    _change(folder / "config.json", lambda raw: raw["text_config"].update(
        full_attention_interval=text["full_attention_interval"]
    ))  # fmt: skip
    _save_processors(folder)


def _save_processors(folder: Path) -> None:
    copy_tokenizer(folder)
    name_tokens(folder, TEXTS, special=True)
    of_tokens = {"image_token": IMAGE, "video_token": VIDEO}
    of_tokens |= {"vision_bos_token": START, "vision_eos_token": END}
    named = {name: TEXTS[token] for name, token in of_tokens.items()}
    named |= {"processor_class": PROCESSOR["processor_class"], "chat_template": CHAT}
    _change(folder / "tokenizer_config.json", lambda raw: raw.update(named))
    for name, kind in (
        ("preprocessor_config", {"image_processor_type": "Qwen2VLImageProcessorFast"}),
        ("video_preprocessor_config", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (folder / f"{name}.json").write_text(json.dumps({**kind, **PROCESSOR}))


def _change(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def picture(seed: int, width: int, height: int) -> str:
    """A data URL of a PNG of random dots, in pixels."""
    dots = random.Random(seed).randbytes(3 * width * height)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), dots).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
