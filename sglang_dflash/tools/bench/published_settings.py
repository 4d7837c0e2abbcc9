"""Settings of the published benchmark command."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dflash.common.command_line import setting
from sglang_dflash.tools.bench.settings import BenchSettings, require_positive


@dataclass(frozen=True)
class PublishedSettings(BenchSettings):
    """One run of the published command, all decided.

    Raises:
        ConfigError: a value is out of range.
    """

    backend: str = setting(
        "sglang",
        "a running server, or a pair over Transformers",
        choices=("sglang", "vllm", "transformers"),
    )
    url: str = setting("http://127.0.0.1:30000", "of the running server (default: {default})")
    verify_block: int | None = setting(None, "tokens verified per step (default: the draft's)")
    window: int | None = setting(None, "committed tokens that the draft attends to (default: all)")
    max_samples: int | None = setting(None, "prompts at most (default: all)")
    timeout_s: float = setting(3600, "of a request (default: {default})")
    output_file: str | None = setting(
        None, "also write the report to this file, as JSON", metavar="FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "max_samples", "timeout_s")
