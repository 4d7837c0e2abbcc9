"""The architectures of targets that a DFLASH worker can serve: their classes in SGLang 0.5.23 give
the hidden states of chosen layers. No SGLang here: a test compares the table with its registry
(tests/serving/start/test_target_classes.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dflash.common.errors import ConfigError, shown

# What SGLang calls on a target's class, whichever DFLASH worker serves.
METHOD = "set_dflash_layers_to_capture"

# All classes that have it, drafts and MTP heads that inherit it included.
_NAMES = """
BeamForCausalLM Cosmos3ForConditionalGeneration DeepseekV2ForCausalLM DeepseekV32ForCausalLM
DeepseekV3ForCausalLM DeepseekV3ForCausalLMNextN Gemma4AssistantForCausalLM Gemma4ForCausalLM
Gemma4ForConditionalGeneration Gemma4UnifiedAssistantForCausalLM
Gemma4UnifiedForConditionalGeneration Glm4MoeLiteForCausalLM Glm4MoeLiteForCausalLMNextN
Glm5NextForConditionalGeneration Glm5NextForConditionalGenerationNextN GlmMoeDsaForCausalLM
GlmMoeDsaForCausalLMNextN GptOssForCausalLM IQuestCoderForCausalLM InklingForConditionalGeneration
InternLM3ForCausalLM InternS1ProForConditionalGeneration InternS2MobiusForConditionalGeneration
InternS2PreviewForConditionalGeneration KimiK25ForConditionalGeneration
KimiK3ForConditionalGeneration KimiK3LinearForCausalLM LagunaForCausalLM Lfm2BidirectionalModel
Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration Llama4ForCausalLM LlamaForCausalLM
LlamaForCausalLMEagle LlamaForCausalLMEagle3 MellumForCausalLM MiMoV2FlashForCausalLM
MiMoV2ForCausalLM MiMoV2MTP MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration
MiniMaxM3SparseForConditionalGeneration Ministral3ForCausalLM MistralForCausalLM
MistralForCausalLMEagle MistralLarge3ForCausalLM MistralLarge3ForCausalLMEagle
MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration MuseSparkForConditionalGeneration
NanbeigeForCausalLM NemotronHForCausalLM NemotronHForCausalLMMTP NemotronHPuzzleForCausalLM
NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3 Phi3ForCausalLM
Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3MoeForCausalLMMTP Qwen3NextForCausalLM
Qwen3NextForCausalLMMTP Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM
Qwen3_5MoeForConditionalGeneration Qwen4ExpForConditionalGeneration TeleFLMForCausalLM
"""
# These inherit it, and a forward of their own drops the hidden states: SGLang's server would end in
# its first forward, when the weights are loaded.
SILENT = frozenset({"Qwen4ExpForConditionalGeneration"})
# SGLang captures hidden states of these where a layer reads them, and no layer reads the output of
# the last one: its server would end after it has loaded the weights, or fail every request. Other
# classes may give that output, too.
_LAST_NOT_GIVEN = """
DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM Glm4MoeLiteForCausalLM
GlmMoeDsaForCausalLM KimiK25ForConditionalGeneration LlamaForCausalLM MistralForCausalLM
Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3VLForConditionalGeneration
Qwen3VLMoeForConditionalGeneration Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration
Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration
"""
WITHOUT_LAST_OUTPUT = frozenset(_LAST_NOT_GIVEN.split())
TARGETS = frozenset(_NAMES.split()) - SILENT


def check_target_class(target: str, architectures: Any) -> None:
    """Check the architectures of a target's config.json, if it names any.

    Raises:
        ConfigError: no DFLASH worker can serve the target. SGLang would load its weights first.
    """
    if not isinstance(architectures, list) or not architectures:
        return
    if not any(str(name) in TARGETS for name in architectures):
        raise unserved_class(target, architectures)


def check_last_layer(layer_ids: Sequence[int], num_layers: int, architectures: Any) -> None:
    """Raise ConfigError if a draft reads the output of the target's last layer, which the target's
    class does not give.

    Args:
        layer_ids: the `target_layer_ids` of the draft, ascending.
        num_layers: of the target.
        architectures: of the target's config.json.
    """
    names = architectures if isinstance(architectures, list) else []
    if layer_ids[-1] == num_layers - 1 and not WITHOUT_LAST_OUTPUT.isdisjoint(map(str, names)):
        required = (
            f"ids below {num_layers - 1} are required: SGLang's class for {shown(names)} does not "
            "give the last layer's output"
        )
        raise ConfigError("target_layer_ids in the draft's config.json", list(layer_ids), required)


def unserved_class(target: str, architectures: Any) -> ConfigError:
    """The error for a target whose class does not have `METHOD`, or is one of `SILENT`."""
    lacks = f"has no {METHOD}"
    if not SILENT.isdisjoint(map(str, architectures)):
        lacks = "returns no hidden states for a draft"
    required = f"SGLang's class for {shown(architectures)} {lacks}: no DFLASH worker, "
    return ConfigError("target", target, f"{required}SGLang's included, can serve it with a draft")
