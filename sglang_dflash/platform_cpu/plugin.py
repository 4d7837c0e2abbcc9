"""Temporary."""


def register() -> None:
    from sglang.srt.platforms import current_platform

    from sglang_dflash.platform_cpu import is_active

    if is_active(current_platform):
        from sglang_dflash.platform_cpu.torch_ops import register_hooks

        register_hooks()
