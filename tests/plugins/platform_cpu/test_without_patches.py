"""SGLang and torch on a plain CPU without our patches: every test shows one defect.

A test that fails here means that a row of `plugins/platform_cpu/patches.py` has lost its reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from torch import Tensor

from sglang_dflash.patches.patch import Patch
from sglang_dflash.plugins.platform_cpu import ATTENTION_BACKEND, torch_ops
from sglang_dflash.plugins.platform_cpu.patches import PATCHES
from tests.patches.originals import original
from tests.plugins.platform_cpu.pools import configurator_of, published_by_sglang
from tests.plugins.platform_cpu.triton_arguments import triton_arguments

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="the platform serves machines without an accelerator"
)


def triton_rows() -> list[Patch]:
    return [row for row in PATCHES if row.proof.endswith("::test_triton_needs_a_gpu")]


def last_names(row: Patch) -> str:
    return ".".join(row.target.split(".")[-2:])


@pytest.mark.parametrize("row", triton_rows(), ids=last_names)
def test_triton_needs_a_gpu(row: Patch) -> None:
    arguments = triton_arguments()[last_names(row)]
    failures = (RuntimeError, ValueError, AssertionError, AttributeError)
    with pytest.raises(failures, match=r"driver|CUDA|torch\.cpu"):
        original(row.target)(*arguments)
    row.value(*arguments)


def test_a_norm_of_qwen3_next_is_made_on_a_gpu() -> None:
    """SGLang asks torch for the current device of the accelerator that it was built for."""

    def make() -> None:
        made.append(torch.get_device_module().current_device())

    made: list[Any] = []
    with pytest.raises(RuntimeError, match=r"driver|CUDA"):
        make()
    (row,) = [row for row in PATCHES if row.target.endswith("Qwen3GatedDeltaNet.__init__")]
    row.value(make)
    assert made == ["cpu"]
    with pytest.raises(RuntimeError, match=r"driver|CUDA"):
        make()


def test_the_pools_take_most_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """15 of 20 GiB for a model without a weight."""
    (row,) = [row for row in PATCHES if row.target.endswith("._profile_available_bytes")]
    published_by_sglang(monkeypatch)
    configurator = configurator_of(torch.nn.Module(), {})
    assert original(row.target)(configurator, 20.0) == 15 << 30
    monkeypatch.setattr("sglang.srt.utils.common.get_available_gpu_memory", lambda *_, **__: 20.0)
    assert row.value(original(row.target), configurator, 20.0) == 256 << 20


def test_sglang_selects_amx_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import platform_hook

    declared: dict[str, str] = {}
    unset = SimpleNamespace(device="cpu", attention_backend=None)
    monkeypatch.setattr(platform_hook, "resolving_view", lambda _args: unset)
    monkeypatch.setattr(
        platform_hook, "declare_resolution", lambda *_args, **values: declared.update(values)
    )
    monkeypatch.setattr(platform_hook, "is_host_cpu_arm64", lambda: False)
    original("sglang.srt.arg_groups.platform_hook.handle_cpu_backends")(SimpleNamespace())
    assert declared == {"attention_backend": "intel_amx", "sampling_backend": "pytorch"}


@pytest.mark.parametrize("name", ["GptOssForCausalLM", "Gemma4ForCausalLM"])
def test_gpt_oss_asks_for_another_attention_backend(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And Gemma 4. With the row it reads the name of one that it takes."""
    from sglang.srt.arg_groups import model_hook

    settings = Settings(model_path="", attention_backend=ATTENTION_BACKEND, _resolved_overrides=[])
    config = Settings(architectures=[name])
    for view in ("resolving_view", "resolved_view"):
        monkeypatch.setattr(model_hook, view, lambda _: settings)
    monkeypatch.setattr(model_hook, "declare_resolution", lambda *_, **__: None)
    monkeypatch.setattr(model_hook, "collect_model_override_declarations", lambda *_: [])
    model = Settings(hf_config=config)
    monkeypatch.setattr(model_hook, "model_config_of", lambda _: model)
    target = "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"
    with pytest.raises(AssertionError, match=ATTENTION_BACKEND):
        original(target)(settings)
    (row,) = [row for row in PATCHES if row.target == target]
    seen = [
        row.value(lambda given: model_hook.attention_backends_of(given), settings),
        model_hook.attention_backends_of(settings),
    ]
    assert seen == [("intel_amx",) * 2, (ATTENTION_BACKEND,) * 2]


class Settings(SimpleNamespace):
    """A server's, of which those that are not given are unset."""

    def __getattr__(self, name: str) -> None:
        return None


def ranks(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    from sglang.srt.distributed import bootstrap

    parallel = SimpleNamespace(dp_size=1, tp_size=count, pp_size=1, tp_rank=0)
    monkeypatch.setattr(bootstrap, "get_parallel", lambda: parallel)
    monkeypatch.setattr(bootstrap, "get_device", lambda: SimpleNamespace(gpu_id=0))


def test_sglang_needs_a_numa_node_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    ranks(monkeypatch, 1024)
    with pytest.raises(AssertionError, match="numa node"):
        original("sglang.srt.distributed.bootstrap._bind_threads_if_cpu")(device="cpu")
    torch_ops.skip_binding(device="cpu")


def test_sglang_places_threads_with_an_amx_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With AMX a kernel of `sgl_kernel`'s CPU build does; without, each rank keeps all cores."""
    from sglang.srt.distributed import bootstrap

    ranks(monkeypatch, 2)
    share = original("sglang.srt.distributed.bootstrap._init_cpu_threads_env")
    monkeypatch.setattr(bootstrap, "_is_cpu_amx_available", True)
    with pytest.raises(AttributeError, match="init_cpu_threads_env"):
        share(local_omp_cpuid=None)
    monkeypatch.setattr(bootstrap, "_is_cpu_amx_available", False)
    monkeypatch.setattr(bootstrap, "_is_cpu_arm64", False)
    threads = torch.get_num_threads()
    share(local_omp_cpuid=None)
    assert "disabled" in caplog.text and torch.get_num_threads() == threads


def test_batch_invariant_mode_needs_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor import model_runner

    deterministic = SimpleNamespace(enable_deterministic_inference=True)
    settings = SimpleNamespace(deterministic=deterministic)
    monkeypatch.setattr(model_runner, "get_exec", lambda: settings)
    enable = original(f"{model_runner.__name__}.ModelRunner.maybe_enable_batch_invariant_mode")
    with pytest.raises(RuntimeError, match="No supported accelerator"):
        enable(SimpleNamespace())


def test_seeded_sampling_needs_the_amx_engine() -> None:
    arguments = torch.tensor([42]), torch.tensor([7]), torch.arange(4)
    with pytest.raises((ImportError, AttributeError), match=r"sgl_kernel|murmur_hash32_cpu"):
        original("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32")(*arguments)


def test_input_embeddings_become_bfloat16() -> None:
    """Float32 embeddings reach the draft as bfloat16, which its float32 weights refuse."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    runner = SimpleNamespace(_pp_kwargs=lambda _: {}, is_generation=True)
    batch = SimpleNamespace(input_embeds=torch.ones(2, 4), replace_embeds=None)
    layer = torch.nn.Linear(4, 4)
    draft = SimpleNamespace(fc=layer)

    def forward(_self: Any, *, input_embeds: Tensor) -> Tensor:
        return layer(input_embeds)

    kwargs = ModelRunner._extend_forward_kwargs(runner, batch, None)
    assert kwargs["input_embeds"].dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="dtype"):
        forward(draft, **kwargs)
    assert torch_ops.draft_in_own_dtype(forward, draft, **kwargs).dtype == torch.float32


def test_a_mask_without_a_grammar_needs_a_kernel() -> None:
    row = next(row for row in PATCHES if row.attribute == "apply_vocab_mask")
    # Token 0 and 33 are allowed.
    logits, mask = torch.zeros(1, 64), torch.tensor([[1, 2]], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="Unsupported device: cpu"):
        original(row.target)(logits, mask)
    torch_ops.forbid_tokens(logits=logits, vocab_mask=mask)
    assert (logits == 0).nonzero()[:, 1].tolist() == [0, 33]


def test_all_gather_needs_an_accelerator() -> None:
    target = "sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor"
    with pytest.raises(NotImplementedError, match="CPU"):
        original(target)(SimpleNamespace(unique_name="tp:0"), torch.zeros(2), torch.zeros(1))


def test_a_cpu_tensor_refuses_a_stream() -> None:
    stream = torch.get_device_module("cpu").current_stream()
    with pytest.raises(RuntimeError):
        torch._C.TensorBase.record_stream(torch.ones(1), stream)
    torch_ops.record_stream(torch.ones(1), stream)


def test_a_cpu_stream_takes_no_device() -> None:
    make = original("sglang.srt.utils.common.create_device_stream")
    with pytest.raises(TypeError, match="device"):
        make(torch.device("cpu"))
    assert isinstance(torch_ops.create_stream(make, "cpu"), torch.cpu.Stream)


def test_memory_cannot_be_pinned() -> None:
    tensor = torch.ones(1)
    with pytest.raises((RuntimeError, AssertionError)):
        torch._C.TensorBase.pin_memory(tensor)
    assert torch_ops.pin_memory(tensor) is tensor


def needs_pinned_memory(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The call fails by itself, and runs with `call_without_pinning`."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch._C.TensorBase.pin_memory)
    with pytest.raises((RuntimeError, AssertionError), match=r"driver|CUDA|accelerator"):
        call()
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch_ops.pin_memory)
    torch_ops.call_without_pinning(call)


def test_lora_layers_need_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`LoRAManager.__init__` wraps the target's layers in these."""
    from sglang.srt.lora.layers import ColumnParallelLinearWithLoRA

    layer = torch.nn.Linear(4, 4)
    layer.output_partition_sizes = [4]
    needs_pinned_memory(lambda: ColumnParallelLinearWithLoRA(layer, None), monkeypatch)


def test_the_canarys_counts_need_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.kv_canary.runner.future_tensor import FutureTensors

    copy = original("sglang.srt.kv_canary.runner.future_tensor.FutureTensors.device_to_host")
    # Without the hook it is bound to its class.
    copy = getattr(copy, "__func__", copy)
    counts, stream = {"counts": torch.arange(3)}, torch.cpu.Stream()
    needs_pinned_memory(lambda: copy(FutureTensors, counts, d2h_stream=stream), monkeypatch)


def sending(overlap: bool) -> tuple[Any, Any, list[Any]]:
    """A prefill server's scheduler, a request of 6 tokens in slots 11 ... 16, of which 3 were
    cached, and what its sender is given."""
    sent: list[Any] = []
    sender = SimpleNamespace(
        supports_host_tensor_indices=True,
        kv_mgr=SimpleNamespace(enable_all_cp_ranks_for_transfer=False),
        get_max_transfer_tokens=lambda: None,
        should_send_kv_chunk=lambda *_: True,
        send=lambda pages, *_, **__: sent.append(pages.tolist()),
    )
    request = SimpleNamespace(
        rid="a", start_send_idx=0, origin_input_ids=[7] * 6, extend_end=6, prefix_len=3,
        host_hit_length=0, pending_bootstrap=False, kv=SimpleNamespace(req_pool_idx=0),
        disagg_kv_sender=sender,
    )  # fmt: skip
    allocator = SimpleNamespace(page_size=1, translate_kv_indices_for_transfer=lambda slots: slots)
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=allocator, enable_staging=False, enable_overlap=overlap,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(11, 17)[None]),
        disagg_prefill_pending_chunk_rids=set(), forward_stream=torch.cpu.Stream(),
        send_kv_chunk=lambda _request, end_idx, **_: sent.append(end_idx),
    )  # fmt: skip
    return scheduler, request, sent


_PREFILL = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"


def test_page_numbers_are_sent_with_an_event() -> None:
    send = original(f"{_PREFILL}._send_kv_chunk")
    scheduler, request, sent = sending(overlap=False)
    with pytest.raises((RuntimeError, AssertionError), match=r"driver|CUDA|accelerator"):
        send(scheduler, request)
    assert torch_ops.send_pages_without_event(True, None, request, 2)
    send(scheduler, request)
    assert sent == [[11, 12, 13, 14, 15, 16]]
    # A request that is refused has no sender.
    assert not torch_ops.send_pages_without_event(False, None, SimpleNamespace(), 2)


def test_a_cached_prefix_is_sent_with_an_event() -> None:
    send = original(f"{_PREFILL}.maybe_send_cached_prefix_chunk")
    scheduler, request, sent = sending(overlap=True)
    with pytest.raises((RuntimeError, TypeError), match=r"driver|CUDA|torch\.cuda"):
        send(scheduler, request)
    torch_ops.send_prefix_without_event(send, scheduler, request)
    assert sent == [3] and scheduler.enable_overlap


def test_lora_batches_need_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    manager = SimpleNamespace(
        lora_backend=TorchNativeLoRABackend(1, torch.device("cpu")),
        memory_pool=SimpleNamespace(uid_to_buffer_id={}),
        max_loras_per_batch=1,
        attn_dp_enabled=False,
        _use_cuda_graph_batch=lambda _batch: False,
        can_use_prefill_cuda_graph=lambda _batch: False,
    )
    batch = SimpleNamespace(lora_ids=[None], forward_mode=ForwardMode.DECODE, batch_size=1)
    prepare = original("sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch")
    needs_pinned_memory(lambda: prepare(manager, batch), monkeypatch)


def test_convolution_inputs_are_kept_as_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the model's dtype, which only a ModelConfig knows; index writes do not cast."""
    monkeypatch.delenv("SGLANG_MAMBA_CONV_DTYPE", raising=False)
    dtypes = original("sglang.srt.configs.mamba_utils.mamba2_state_dtype")
    config = SimpleNamespace(dtype=torch.float32)
    assert dtypes(config).conv == torch.bfloat16
    cache = torch.zeros(2, 4, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        cache[torch.tensor([1])] = torch.ones(1, 4)
    model = SimpleNamespace(hf_text_config=config, dtype=torch.float32)
    torch_ops.note_model_dtype(None, model)
    assert torch_ops.conv_cache_in_model_dtype(dtypes, config).conv == torch.float32
    # Unless the user says otherwise.
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float16")
    assert torch_ops.conv_cache_in_model_dtype(dtypes, config).conv == torch.float16


def test_float16_is_the_dtype_of_activations_too() -> None:
    decide = original("sglang.srt.configs.model_config._get_and_verify_dtype")
    assert decide({"dtype": "bfloat16"}, "float16") == torch.float16


def test_the_lm_heads_weight_is_multiplied_as_stored() -> None:
    """A packed one has no weight of its own."""
    head = torch.nn.Module()
    head.quant_method = UnquantizedEmbeddingMethod()
    processor = SimpleNamespace(use_fp32_lm_head=False, use_fp32_lm_head_output=False,
                                rl_on_policy_target=None)  # fmt: skip
    compute = original("sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head")
    with pytest.raises(AttributeError, match="weight"):
        compute(processor, torch.randn(2, 4), head)


def test_weights_by_ipc_are_loaded_into_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The methods that have packed them are not told."""
    called = []
    # It needs a package that is not installed here.
    worker = SimpleNamespace(update_weights_from_ipc=lambda _: called.append("loaded"))
    monkeypatch.setitem(
        sys.modules,
        "sglang.srt.checkpoint_engine.checkpoint_engine_worker",
        SimpleNamespace(SGLangCheckpointEngineWorkerExtensionImpl=lambda _: worker),
    )
    updater = SimpleNamespace(
        _assert_weight_cache_inactive=lambda _: None, get_model=torch.nn.Module,
        get_model_runner=lambda: None, begin_weight_update=lambda: called.append("begin"),
    )  # fmt: skip
    update = original(
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
        ".update_weights_from_ipc"
    )
    assert update(updater, SimpleNamespace(zmq_handles={}))[0]
    assert called == ["loaded"]
