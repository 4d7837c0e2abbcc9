"""Every server that the tests start, by name.

A configuration is a value: another one is made of it by changing flags. It contains no path of the
test session; `{files}` in a flag or a variable stands for the session's folder (see session.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sglang_dflash.plugins.platform_cpu import OVERLAP
from sglang_dflash.tools.bench import server
from sglang_dflash.tools.bench.server import Server
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.engine import workload
from tests.engine.nursery import NURSERY

PAIR = demo_pair("dense")
FILES = "{files}"
CHAT_WINDOW = 512

# A function that sends requests to a server and returns what came back, in a form that pickles.
Ask = Callable[[Server], Any]


@dataclass(frozen=True)
class ServerConfig(server.ServerConfig):
    """A server of the tests, by name. `nursery` is what the process that forks it runs; one without
    starts from the command line."""

    name: str = ""
    nursery: tuple[str, ...] = (NURSERY,)

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def named(self, name: str) -> ServerConfig:
        return replace(self, name=name)

    def having(self, **flags: Any) -> ServerConfig:
        """Add or replace flags: `tp_size=2` is `--tp-size 2`, True is a switch, None removes."""
        given = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
        kept = self.without_flags(*(flag for flag, value in given.items() if value is None))
        return kept.with_flags(
            {
                flag: value if value is True else str(value)
                for flag, value in given.items()
                if value is not None
            }
        )

    def with_env(self, **env: str) -> ServerConfig:
        return replace(self, env={**self.env, **env})

    def changed(self, how: str) -> ServerConfig:
        """A launcher that changes SGLang first: a function of changed_server.py."""
        return replace(self.with_env(CHANGED=how), module="tests.engine.changed_server")


FAULTS = f"{FILES}/faults"


def faulty(config: ServerConfig, how: str = "faults") -> ServerConfig:
    """Its steps fail on demand (see faults.py)."""
    return config.named(f"{config}-faulty").changed(how).with_env(FAULTS=FAULTS)


def recording_name(config: ServerConfig, ask: Ask) -> str:
    """The file in the session's folder that holds a server's answers to `ask`."""
    return f"{config}.{ask.__module__.rpartition('.')[2]}.{ask.__name__}.pickle"


# -- the demo pair

# As on an accelerator; a plain CPU would not overlap.
OVERLAPPED = ServerConfig(env={OVERLAP: "1"})
PLAIN = OVERLAPPED.named("plain").having(
    model_path=PAIR.target, dtype="float32", max_total_tokens=32768
)


def drafting(draft: object) -> dict[str, Any]:
    """Flags of a server that drafts whole blocks in every step, however little they pay."""
    flags = server.dflash_flags(str(draft))
    return {flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items()}


DFLASH_FLAGS = drafting(PAIR.draft)
# What is accepted is the draft's: lookup, which is on by default, has servers of its own.
DFLASH = PLAIN.named("dflash").having(**DFLASH_FLAGS, speculative_dflash_lookup="off")
BUILTIN = PLAIN.named("builtin").having(**DFLASH_FLAGS, speculative_dflash_worker="builtin")
PAGES = DFLASH.having(
    page_size=16,
    chunked_prefill_size=256,
    enable_metrics=True,
    enable_custom_logit_processor=True,
)
LOOKUP = {"speculative_dflash_lookup": "on"}
# Blocks that only lookup can fill.
WIDE = {**LOOKUP, "speculative_num_draft_tokens": 20}
# Sliding and full layers; the second is of DFlash2.
MIXED = {"speculative_draft_model_path": f"{FILES}/mixed-draft", **LOOKUP}
SECOND = {"speculative_draft_model_path": f"{FILES}/dflash2-draft", **LOOKUP}
QUANTIZED = {"speculative_draft_model_path": f"{FILES}/draft-W4A16-zero-points/quantized"}
PAGE16_NO_OVERLAP = PAGES.named("page16-no-overlap").having(disable_overlap_schedule=True, **SECOND)
WINDOW = {"speculative_dflash_draft_window_size": 96, "speculative_draft_sink_size": 4}
# Its draft's config claims training on no more than 64 positions.
PAGE16_WINDOW = PAGES.named("page16-window").having(
    speculative_draft_model_path=f"{FILES}/short-draft", **WINDOW
)
# SGLang checks its pools after every step. The last variable is one that no log may show.
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SOAK_SECRET": "a-value-of-the-environment",
}
WATCHED: dict[str, Any] = {
    "speculative_dflash_extension": "tests.reliability.watched:extension",
    "speculative_dflash_draft_kv_tokens": 150,
    "enable_metrics": True,
    **WINDOW,
}
# An eighth of the KV, too little draft KV; SGLang's test switch retracts requests every 15 steps.
TIGHT = (
    DFLASH.named("tight")
    .having(
        max_total_tokens=4000,
        max_running_requests=8,
        enable_return_hidden_states=True,
        **WATCHED,
        **(SECOND | WIDE),
    )
    .with_env(SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="15", **STRICT)
)
# Neither checkpoint has weights.
SIMULATED = (
    DFLASH.named("simulated")
    .having(
        model_path=f"{FILES}/config-only/target",
        speculative_draft_model_path=f"{FILES}/config-only/draft",
        load_format="dummy",
    )
    .with_env(SGLANG_SIMULATE_ACC_LEN="3.5", SGLANG_SIMULATE_ACC_TOKEN_MODE="real-draft-token")
)
TP2 = DFLASH.named("tp2").having(tp_size=2, **QUANTIZED)
# The second rank's logits and drafts are other ones: it has to follow the first.
TP2_DISAGREEING = faulty(
    TP2.having(speculative_dflash_extension="tests.engine.extensions:disagreeing")
).named("tp2-disagreeing")
DP2 = DFLASH.named("dp2").having(dp_size=2)

# As on a GPU with FlashAttention, the host knows only bounds of the lengths. Blocks are wider than
# the draft was trained for, and requests reach the end of the context.
DEVICE_LENGTHS = DFLASH.named("device-lengths").having(
    speculative_num_draft_tokens=16,
    context_length=96,
    speculative_dflash_extension="tests.engine.extensions:no_host_lengths",
)

# -- the drafter's steps from recordings; most batches have up to 8 requests

RECORDED: dict[str, Any] = {
    "speculative_dflash_extension": "tests.engine.extensions:recorded_steps",
    "max_running_requests": 8,
}
GRAPHS = replace(
    DFLASH.named("graphs").having(page_size=16, **RECORDED, **(SECOND | WIDE)),
    extra_args=("--cuda-graph-bs-decode", "1", "2", "6"),
)
HYBRID_PAIR = demo_pair("hybrid")
HYBRID_PAIR_PLAIN = PLAIN.named("hybrid-pair").having(
    model_path=f"{FILES}/hybrid-seeing",
    max_mamba_cache_size=64,
    mamba_track_interval=64,
    mamba_scheduler_strategy="extra_buffer",
    max_running_requests=8,
)
HYBRID_PAIR_DFLASH = HYBRID_PAIR_PLAIN.named("hybrid-pair-dflash").having(
    **drafting(HYBRID_PAIR.draft)
)
HYBRID_PAIR_GRAPHS = replace(
    HYBRID_PAIR_PLAIN.named("hybrid-pair-graphs").having(
        **drafting(f"{FILES}/dflash2-hybrid-draft"),
        speculative_dflash_recurrent_rollback="snapshot",
        **RECORDED,
    ),
    extra_args=("--cuda-graph-bs-decode", "1", "3", "5"),
)
# -- half an hour of traffic, of 32 clients

SOAK_PLAIN = PLAIN.named("soak-plain").having(max_running_requests=16)
SOAK = (
    SOAK_PLAIN.named("soak")
    .having(**DFLASH_FLAGS, **WATCHED)
    .having(**MIXED, max_total_tokens=12000, max_running_requests=32)
    .with_env(**STRICT)
)
SOAK_HYBRID = (
    HYBRID_PAIR_PLAIN.named("soak-hybrid")
    .having(**drafting(HYBRID_PAIR.draft), **WATCHED)
    .having(max_total_tokens=12000)
    .with_env(**STRICT)
)

# -- verify widths that change

CHANGING = {"speculative_dflash_extension": "tests.engine.extensions:random_widths"}
# With an attention backend of the target per width, as on a GPU.
BY_WIDTH = {"speculative_dflash_extension": "tests.engine.extensions:random_widths_with_backends"}
RANDOM_WIDTHS_TP2 = TP2.named("random-widths-tp2").having(**CHANGING, **(SECOND | WIDE))
HYBRID_PAIR_WIDTHS = HYBRID_PAIR_PLAIN.named("hybrid-pair-widths").having(
    **drafting(f"{FILES}/dflash2-hybrid-draft"), **BY_WIDTH, **WIDE
)
COUNTED = DFLASH.named("adaptive").having(enable_metrics=True, **MIXED)
ADAPTIVE = COUNTED.having(speculative_dflash_width="adaptive")

# -- the draft KV cache

CHATS_DEFAULT = DFLASH.named("chats-default").having(
    speculative_draft_window_size=CHAT_WINDOW, max_running_requests=8
)
CHATS_UNBOUNDED = CHATS_DEFAULT.named("chats-unbounded").having(
    speculative_dflash_draft_kv_tokens=100000
)
# -- a target with sliding layers: theirs is a pool of its own, a quarter of the other

SLIDING_PLAIN = PLAIN.named("sliding-plain").having(
    model_path=f"{FILES}/sliding", disable_hybrid_swa_memory=True
)
SLIDING = (
    DFLASH.named("sliding")
    .having(
        model_path=f"{FILES}/sliding",
        max_total_tokens=12000,
        swa_full_tokens_ratio=0.25,
        max_running_requests=8,
    )
    .with_env(**STRICT)
)
SLIDING_PAGES_WINDOW = SLIDING.named("sliding-page16-window").having(page_size=16, **WINDOW)
# -- a finite draft whose logits overflow

OVERFLOWING = DFLASH.named("overflowing").having(
    speculative_draft_model_path=f"{FILES}/overflowing-draft", enable_metrics=True
)

# As many KV tokens as the server finds memory for, on a machine of fixed size.
SIZED = PLAIN.changed("sized").having(
    max_total_tokens=None, mem_fraction_static=0.2, max_running_requests=16
)
BOUNDED = SIZED.named("bounded").having(**DFLASH_FLAGS, speculative_draft_window_size=512)
SLIDING_DRAFT = {"speculative_draft_model_path": f"{FILES}/sliding-draft"}

# -- sampling with seeds

DETERMINISTIC = {"enable_deterministic_inference": True}
SEEDED_PLAIN = SIZED.named("seeded-plain").having(**DETERMINISTIC)
SEEDED = DFLASH.named("seeded").having(**DETERMINISTIC, **WIDE)
# Every prompt takes several prefills.
SEEDED_CHUNKS = SEEDED.named("seeded-chunks").having(chunked_prefill_size=16)
SEEDED_TP2 = SEEDED.named("seeded-tp2").having(tp_size=2, **SECOND)
SEEDED_HYBRID_PLAIN = HYBRID_PAIR_PLAIN.named("seeded-hybrid-plain").having(**DETERMINISTIC)
SEEDED_HYBRID = SEEDED_HYBRID_PLAIN.named("seeded-hybrid").having(**drafting(HYBRID_PAIR.draft))

# -- pools and contexts that a request or two fill; SGLang looks for leaks after every step


def _full(name: str, base: ServerConfig, **flags: Any) -> ServerConfig:
    config = base.named(name).having(max_total_tokens=256, max_running_requests=4, **flags)
    return config.with_env(**STRICT)


FULL_PLAIN = {page: _full(f"full-plain-{page}", PLAIN, page_size=page) for page in (1, 16)}
FULL = {
    (page, block): _full(
        f"full-{page}-{block}", DFLASH, page_size=page, speculative_num_draft_tokens=block
    )
    for page in (1, 16)
    for block in (8, 16)
}
SHORT: dict[str, Any] = {"context_length": 96, "max_total_tokens": 4096}
SHORT_PLAIN = FULL_PLAIN[1].named("short-plain").having(**SHORT)
SHORT_CONTEXT = [config.named(f"short-{config}").having(**SHORT) for config in FULL.values()]
FULL_NO_OVERLAP = FULL[1, 16].named("full-no-overlap").having(disable_overlap_schedule=True)

# -- request features: what all of them need of a server, at once

FEATURES = PLAIN.having(
    max_running_requests=8,
    enable_mixed_chunk=True,
    chunked_prefill_size=128,
    enable_priority_scheduling=True,
    enable_custom_logit_processor=True,
    enable_return_hidden_states=True,
    enable_streaming_session=True,
    constrained_json_disable_any_whitespace=True,
    enable_lora=True,
    lora_paths=f"adapter={FILES}/adapter",
)
FEATURES_PLAIN = FEATURES.named("features-plain").having(disable_overlap_schedule=True)
FEATURES_DFLASH = FEATURES.named("features-dflash").having(**DFLASH_FLAGS)
FEATURES_WIDTHS = FEATURES_DFLASH.named("features-widths").having(**CHANGING, **WIDE)
FEATURES_DFLASH_NO_OVERLAP = FEATURES_DFLASH.named("features-dflash-no-overlap").having(
    disable_overlap_schedule=True
)
# Our worker without the repairs. Its drafts are of random widths: one is plain decoding.
WITHOUT_REPAIRS = {"SGLANG_PLUGINS": "dflash,dflash_cpu"}
WORKER_ONLY = FEATURES_WIDTHS.named("worker-only").with_env(**WITHOUT_REPAIRS)
# Plain decoding under overlap, with our penalties and with SGLang's.
FEATURES_OVERLAPPED = FEATURES.named("features-overlapped")
SGLANGS_PENALTIES = FEATURES.named("sglangs-penalties").changed("no_penalty_rows")

# -- targets with recurrent layers: random ones, dense and with experts, and one draft for both

# States are kept for the prefix cache every 64 tokens: many verify steps cross such a boundary.
HYBRID = OVERLAPPED.named("hybrid").having(
    dtype="float32",
    max_total_tokens=16384,
    max_mamba_cache_size=64,
    max_running_requests=8,
    mamba_track_interval=64,
    model_path=f"{FILES}/hybrid",
)
HYBRID_MOE = HYBRID.having(model_path=f"{FILES}/hybrid-moe")
HYBRID_NEXT = HYBRID.having(model_path=f"{FILES}/hybrid-next")
# Every way that SGLang allows of keeping recurrent states for the prefix cache, overlapped or not.
KEPT_STATES: dict[str, dict[str, Any]] = {
    "extra-buffer": {"mamba_scheduler_strategy": "extra_buffer"},
    "extra-buffer-no-overlap": {
        "mamba_scheduler_strategy": "extra_buffer",
        "disable_overlap_schedule": True,
    },
    "lazy": {"mamba_radix_cache_strategy": "extra_buffer_lazy"},
    "no-buffer": {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
}


def shown_states(config: ServerConfig) -> str:
    """The folder to which a hybrid server writes its recurrent states (see shown_states.py)."""
    return f"{FILES}/shown-{config}"


def _plain_hybrid(name: str, base: ServerConfig, **flags: Any) -> ServerConfig:
    config = base.named(name).having(**flags)
    return config.changed("states").with_env(SHOWN=shown_states(config))


def _hybrid(name: str, base: ServerConfig, plain: ServerConfig, **flags: Any) -> ServerConfig:
    """Drafts are made of the answers of `plain`, which must have been recorded before the start."""
    config = base.named(name).having(
        **drafting(f"{FILES}/hybrid-draft"),
        speculative_dflash_extension="tests.engine.oracle:extension",
        **flags,
    )
    oracle = recording_name(plain, workload.hybrid_answers)
    return config.with_env(SHOWN=shown_states(config), ORACLE=f"{FILES}/{oracle}")


HYBRID_PLAIN = _plain_hybrid("hybrid-plain", HYBRID)
HYBRID_PLAIN_NO_BUFFER = _plain_hybrid("hybrid-plain-no-buffer", HYBRID, **KEPT_STATES["no-buffer"])
HYBRID_MOE_PLAIN = _plain_hybrid("hybrid-moe-plain", HYBRID_MOE)
HYBRID_NEXT_PLAIN = _plain_hybrid("hybrid-next-plain", HYBRID_NEXT)
ROLLBACKS = ("replay", "snapshot")
HYBRID_ROLLBACK = {
    (rollback, kept): _hybrid(
        f"hybrid-{rollback}-{kept}",
        HYBRID,
        # Whose prefix cache keeps states as often.
        HYBRID_PLAIN_NO_BUFFER if kept == "no-buffer" else HYBRID_PLAIN,
        speculative_dflash_recurrent_rollback=rollback,
        page_size=16 if kept == "extra-buffer-no-overlap" else 1,
        **flags,
    )
    for rollback in ROLLBACKS
    for kept, flags in KEPT_STATES.items()
}
HYBRID_TP2 = {
    rollback: _hybrid(
        f"hybrid-{rollback}-tp2",
        HYBRID,
        HYBRID_PLAIN,
        speculative_dflash_recurrent_rollback=rollback,
        tp_size=2,
    )
    for rollback in ROLLBACKS
}
HYBRID_WIDTHS = {
    kept: _hybrid(f"hybrid-widths-{kept}", HYBRID, HYBRID_PLAIN, **KEPT_STATES[kept]).having(
        speculative_dflash_extension="tests.engine.extensions:random_widths_of_known_drafts"
    )
    for kept in ("extra-buffer", "lazy")
}
HYBRID_MOE_DFLASH = _hybrid("hybrid-moe-auto", HYBRID_MOE, HYBRID_MOE_PLAIN)
HYBRID_NEXT_DFLASH = _hybrid("hybrid-next-auto", HYBRID_NEXT, HYBRID_NEXT_PLAIN)
