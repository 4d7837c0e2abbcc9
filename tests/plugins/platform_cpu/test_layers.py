"""Layers in fewer calls against SGLang's own, and packed weights inside SGLang's layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import Gemma4RMSNorm, GemmaRMSNorm, RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding
from torch import nn

from sglang_dflash.drafting.packed import Float16, packed_of
from sglang_dflash.plugins.platform_cpu import layers, linear
from sglang_dflash.plugins.platform_cpu.pool_size import weight_bytes

WIDTH = 64


def norm(kind: type = RMSNorm, **settings: object) -> nn.Module:
    made = kind(WIDTH, **settings)
    made.weight.data.normal_()
    if kind is GemmaRMSNorm:
        made.refresh_gemma_weight()
    return made


@pytest.mark.parametrize("kind", [RMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("more", [0, 1, 2], ids=["alone", "residual", "addition"])
def test_norms(kind: type, more: int) -> None:
    own = norm(kind)
    ours = layers.rms_norm if kind is RMSNorm else layers.gemma_rms_norm
    x = torch.randn(5, WIDTH)
    others = [torch.randn(5, WIDTH) for _ in range(more)]
    kept = x.clone(), *(t.clone() for t in others)
    torch.testing.assert_close(ours(own, x, *others), own.forward_native(x, *others))
    # A caller may have captured any of them.
    assert all(torch.equal(a, b) for a, b in zip(kept, (x, *others), strict=True))


@pytest.mark.parametrize(
    "settings",
    [{"var_hidden_size": 32}, {"fp32_residual": True}, {"override_orig_dtype": torch.bfloat16}],
)
def test_a_norm_of_another_kind_is_sglangs(settings: dict) -> None:
    own, x = norm(**settings), torch.randn(5, WIDTH)
    assert torch.equal(layers.rms_norm(own, x), own.forward_native(x))


@pytest.mark.parametrize("settings", [{}, {"scale_shift": 1.0}, {"with_scale": False}])
def test_the_norm_of_gemma_4(settings: dict) -> None:
    own, x = Gemma4RMSNorm(WIDTH, **settings), torch.randn(5, 3, WIDTH)
    torch.testing.assert_close(layers.gemma4_rms_norm(own, x), own.forward_native(x))
    # That of a router, whose scale SGLang's torch code leaves out.
    scale = own.weight.data.normal_() + settings.get("scale_shift", 0)
    wanted = Gemma4RMSNorm(WIDTH).forward_native(x) * scale
    torch.testing.assert_close(layers.gemma4_rms_norm(own, x), wanted)
    assert torch.allclose(own.forward_native(x), wanted) == own.with_scale


def test_silu_and_mul() -> None:
    x = torch.randn(5, 2 * WIDTH)
    torch.testing.assert_close(layers.silu_and_mul(None, x), SiluAndMul().forward_native(x))


def rotary(kind: type = RotaryEmbedding, rotary_dim: int = 16, neox: bool = True) -> nn.Module:
    more = (2.0,) if kind is YaRNScalingRotaryEmbedding else ()
    return kind(16, rotary_dim, 64, 10000, neox, *more, torch.float32)


@pytest.mark.parametrize(
    "own",
    [lambda: rotary(), lambda: rotary(rotary_dim=8), lambda: rotary(neox=False),
     lambda: rotary(YaRNScalingRotaryEmbedding)],
    ids=["whole", "partial", "gptj", "yarn"],
)  # fmt: skip
def test_rope(own) -> None:
    """Rotate in forwards with other positions, and other tokens at the same positions."""
    rope = own()
    for positions in (
        torch.arange(5),
        torch.arange(5),
        torch.tensor([7, 3, 0, 9, 20]),
        torch.arange(3),
    ):
        q, k = torch.randn(len(positions), 3 * 16), torch.randn(len(positions), 16)
        wanted = rope.forward_native(positions, q.clone(), k.clone())
        torch.testing.assert_close(layers.rotate(rope, positions, q, k), wanted)


def test_positions_that_change_in_place_are_seen() -> None:
    rope = rotary()
    positions, q, k = torch.arange(5), torch.randn(5, 16), torch.randn(5, 16)
    layers.rotate(rope, positions, q, k)
    positions += 3
    torch.testing.assert_close(
        layers.rotate(rope, positions, q, k), rope.forward_native(positions, q.clone(), k.clone())
    )


def test_every_rotation_that_sglang_computes_alike_is_ours() -> None:
    from sglang.kernels.fused_op import BaseFusedOp

    layers.register("test_of_layers")
    forwards = BaseFusedOp._oot_forward_registry.pop("test_of_layers")
    assert forwards[YaRNScalingRotaryEmbedding] is layers.rotate
    assert forwards[RMSNorm] is layers.rms_norm and forwards[SiluAndMul] is layers.silu_and_mul


class Model(nn.Module):
    """SGLang's layers: a linear one, an embedding, and an lm_head, tied or not."""

    def __init__(self, tied: bool) -> None:
        from sglang.srt.layers.linear import ReplicatedLinear
        from sglang.srt.layers.vocab_parallel_embedding import (
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        super().__init__()
        self.embed = VocabParallelEmbedding(128, WIDTH, enable_tp=False)
        self.linear = ReplicatedLinear(WIDTH, 96, bias=True)
        self.lm_head = self.embed if tied else ParallelLMHead(128, WIDTH, enable_tp=False)
        for weight in self.parameters():
            weight.data.normal_(std=0.1)


def embedded_by(model: Model, ids: torch.Tensor) -> torch.Tensor:
    return model.embed.quant_method.embedding(model.embed, ids)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


@pytest.mark.parametrize("asked", ["float32", "float16"])
def test_a_model_is_packed_and_restored(model: Model, asked: str) -> None:
    x, ids = torch.randn(3, WIDTH), torch.tensor([5, 0, 99])
    before = {name: weight.data.clone() for name, weight in model.named_parameters()}
    attributes = dict(vars(model.linear.weight))
    wanted, embedded = model.linear(x)[0], embedded_by(model, ids)
    of_head = x @ model.lm_head.weight.T
    bytes_before = weight_bytes(model)
    linear.pack_model(model, asked)
    # The pools of a plain CPU get as much memory as the weights take.
    packed = sum(before[name].nbytes for name in before.keys() - {"embed.weight", "linear.bias"})
    halved = packed // 2 if asked == "float16" else 0
    assert weight_bytes(model) == bytes_before - halved
    left = {name for name, _ in model.named_parameters()}
    assert left == {"embed.weight", "linear.bias"}
    assert isinstance(packed_of(model.linear), Float16) == (asked == "float16")
    near = {"atol": 1e-3, "rtol": 1e-3} if asked == "float16" else {}
    torch.testing.assert_close(model.linear(x)[0], wanted, **near)
    assert torch.equal(embedded_by(model, ids), embedded)
    got = linear.head_logits(None, SimpleNamespace(use_fp32_lm_head=False), x, model.lm_head)
    torch.testing.assert_close(got, of_head, **near)

    for layer in (model.linear, model.lm_head):
        layer.quant_method.restore_weights_before_loading(layer)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and packed_of(model.linear) is None
    assert dict(vars(after["linear.weight"])).keys() == attributes.keys()
    for name, weight in after.items():
        torch.testing.assert_close(weight.data, before[name], **near)
    # New weights are served.
    after["linear.weight"].data.zero_()
    model.linear.quant_method.process_weights_after_loading(model.linear)
    torch.testing.assert_close(model.linear(x)[0], model.linear.bias.expand(3, -1))


def test_what_reads_a_packed_weight_gets_it(model: Model) -> None:
    kept = model.linear.weight.data.clone()
    linear.pack_model(model, "float32")
    assert torch.equal(model.linear.weight, kept) and model.linear.weight is model.linear.weight


@pytest.mark.parametrize(
    ("asked", "chosen", "fast", "wanted"),
    [
        ("auto", torch.bfloat16, True, torch.bfloat16),
        ("auto", torch.bfloat16, False, torch.float32),
        ("bfloat16", torch.bfloat16, False, torch.bfloat16),
        ("half", torch.float16, True, torch.float32),
        ("float16", torch.float16, False, torch.float32),
        ("float32", torch.float32, False, torch.float32),
    ],
)
def test_dtypes(asked, chosen, fast, wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_amx", lambda: fast)
    monkeypatch.setattr(linear, "packs_float16", lambda: True)
    assert linear.model_dtype(lambda *_: chosen, None, asked) == wanted
    monkeypatch.setattr(linear, "packs_float16", lambda: False)
    assert linear.model_dtype(lambda *_: chosen, None, asked) == chosen
