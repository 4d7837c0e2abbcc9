"""SGLang's own tests of a server, installed with it (`sglang.test.kits`): those that pass with
plain decoding pass with our worker. A kit or a test that a new SGLang brings is run, or it gets a
reason below."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import unittest
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_dflash.tools.bench.server import Server
from tests.engine import servers as s
from tests.engine.client import at_rest
from tests.engine.servers import ServerConfig

# SGLang depends on it; a cut-down installation for a lent GPU may lack it.
pytest.importorskip("anthropic", reason="SGLang's kits import anthropic")

PLAIN = s.PLAIN.named("kits-plain").having(
    model_path=s.PAIR.target,
    enable_return_hidden_states=True,
    enable_streaming_session=True,
    allow_auto_truncate=True,
)
DFLASH = PLAIN.named("kits-dflash").having(**s.drafting(s.PAIR.draft))
KITS = (
    "abort_timeout_kit.AbortAllMixin",
    "anthropic_messages_kit.AnthropicMessagesMixin",
    "basic_api_contract_kit.BasicAPIContractMixin",
    "basic_decode_correctness_kit.BasicDecodeCorrectnessMixin",
    "basic_scheduler_stress_kit.BasicSchedulerStressMixin",
    "ebnf_constrained_kit.EBNFConstrainedMixin",
    "json_constrained_kit.JSONConstrainedMixin",
    "json_mode_kit.JSONModeMixin",
    "matched_stop_kit.MatchedStopMixin",
    "pause_generation_kit.PauseResumeInPlaceMixin",
    "regex_constrained_kit.RegexConstrainedMixin",
    "spec_server_kits.SpecCorrectnessKit",
    "spec_server_kits.SpecFeatureKit",
    "spec_server_kits.SpecGrammarKit",
    "spec_server_kits.SpecHiddenStatesKit",
    "spec_server_kits.SpecLogprobKit",
    "spec_server_kits.SpecPenaltyKit",
    "spec_server_kits.SpecPerfKit",
    "spec_server_kits.SpecSamplingMaskKit",
    "streaming_session_kit.AbortLeakReproKitMixin",
    "streaming_session_kit.StreamingSessionKitMixin",
)
# Modules of kits of which none is run, and kits of the other modules.
OTHER_KITS = {
    "attention_unittest": "SGLang's attention backends",
    "cache_hit_kit": "no tests, only a load generator",
    "dsa_metadata_kit": "sparse attention of DeepSeek",
    "eval_accuracy_kit": "knowledge, and data sets from the hub",
    "fwd_occupancy_kit": "a GPU's occupancy",
    "kl_divergence_kit": "a data set from the hub",
    "lm_eval_kit": "knowledge, and data sets from the hub",
    "mmmu_vlm_kit": "images",
    "pd_parity_kit": "prefill and decode servers",
    "perf_bench_kit": "speed",
    "prefix_cache_branching_kit": "recurrent targets, in chunks that the server has to know",
    "radix_cache_server_kit": "no tests; SpecFeatureKit calls it",
    "reasoning_kit": "a model that thinks",
    "spec_decoding_kit": "speed",
    "unified_radix_cache": "SGLang's unified prefix cache",
    "unified_radix_cache_kit": "SGLang's unified prefix cache, and data sets from the hub",
    "vlm_perf_kit": "images, speed",
}
OTHER_KITS |= {
    "abort_timeout_kit.RunningTimeoutTwoWaveMixin": "a server with a time limit",
    "abort_timeout_kit.WaitingTimeoutMixin": "a server with a time limit",
    "spec_server_kits.SpecAccuracyKit": "knowledge, and a data set from the hub",
    "spec_server_kits.SpecParityKit": "it starts servers; test_exactness.py compares",
}
FRANCE = "the answer is the capital of France"
# Tests of the kits above that are not run. The demo pair knows Python only.
LEFT_OUT = {
    "test_capital_france": FRANCE,
    "test_concurrent_requests": FRANCE,
    "test_streaming_response": FRANCE,
    "test_basic_math": "the answer is a product",
    "test_color_completion": "the answer is the color of a banana",
    "test_acc_length": "an acceptance length above 3.1, which plain decoding has not",
    "test_batch_generation": "an acceptance length above 1.75, of chats",
    "test_logprob_mixed": "token ids above the vocabulary",
    "test_max_token_one": "speed, with a data set from the hub",
    "test_ebnf_generate_complex_json": "samples numbers until one has few enough digits",
    "test_regex_generate_complex_json": "samples blanks until there are few enough",
    "test_grammar_structured_output_no_trailing_tokens": "a string that ends within 256 tokens",
    "test_grammar_logprob_count_matches_completion_tokens": "a string that ends within 256 tokens",
    "test_constrained_decoding": "a JSON object that ends within the context",
    "test_finish_stop_eos": "token ids of Llama",
    "test_radix_attention": "a vocabulary of 32,000 tokens",
    "test_abort_heavy_chunked_prefill_does_not_leak": "a prefill that takes seconds",
}


@functools.cache
def kit_of(name: str) -> Any:
    module, _, kit = name.partition(".")
    return getattr(importlib.import_module(f"sglang.test.kits.{module}"), kit)


def names_in(kit: Any) -> list[str]:
    return sorted(name for name in dir(kit) if name.startswith("test_"))


def cases() -> Iterator[Any]:
    for config in (PLAIN, DFLASH):
        for name in KITS:
            for test in names_in(kit_of(name)):
                if test not in LEFT_OUT:
                    yield pytest.param(config, name, test, id=f"{config}-{test}")


@pytest.mark.long
@pytest.mark.parametrize(("config", "name", "test"), cases())
def test_a_test_of_sglangs_passes(
    config: ServerConfig, name: str, test: str, server: Server
) -> None:
    import openai
    from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase
    from transformers import AutoTokenizer

    model = str(s.PAIR.target)
    # What SGLang's fixtures give to kits.
    helpers = ("send_request", "send_requests_abort", "run_decode")
    given = {name: getattr(SpecEagleServerBase, name) for name in helpers} | {
        "base_url": server.url,
        "model": model,
        "tokenizer": AutoTokenizer.from_pretrained(model),
        "process": server.process,
        "api_key": "none",
        "client": openai.Client(api_key="none", base_url=f"{server.url}/v1"),
    }
    case: Any = type("Case", (kit_of(name), unittest.TestCase), given)
    case.setUpClass()
    case(test).debug()
    at_rest(server)


def test_every_kit_is_run_or_has_a_reason() -> None:
    from sglang.test import kits

    modules = {name.partition(".")[0] for name in KITS}
    found = {module.name for module in pkgutil.iter_modules(kits.__path__)}
    for module in modules:
        path = f"sglang.test.kits.{module}"
        for kit in vars(importlib.import_module(path)).values():
            if getattr(kit, "__module__", "") == path and names_in(kit):
                found.add(f"{module}.{kit.__name__}")
    assert modules | set(KITS) | set(OTHER_KITS) == found
    assert set(LEFT_OUT) <= {test for name in KITS for test in names_in(kit_of(name))}
