"""The published flags as keywords of `sglang.Engine`, in a process of its own."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from tests.engine.session import ServerSession
from tests.serving.published import (
    ASKED,
    PUBLISHED,
    WINDOW,
    flags,
    local,
    needs_plain_cpu,
    on_this_machine,
    tiny_checkpoints,
)

ENGINE = """
import json, sys
import sglang
from sglang.srt.entrypoints.engine import Engine

class Stopped(Exception):
    pass

def stop(self, server_args, **others):
    server_args.resolve_once()
    raise Stopped(server_args)

Engine._launch_subprocesses = stop
from tests.serving.published import resolved_fields
found = []
for kwargs in json.loads(sys.argv[1]):
    try:
        sglang.Engine(**kwargs)
    except Stopped as stopped:
        found.append(resolved_fields(stopped.args[0]))
print(json.dumps(found))
"""


@needs_plain_cpu
def test_engine_takes_the_published_flags_as_keywords(
    tmp_path: Path, servers: ServerSession
) -> None:
    def literal(word: str) -> Any:
        try:
            return ast.literal_eval(word)
        except (ValueError, SyntaxError):
            return word

    def keywords(argv: list[str]) -> dict[str, Any]:
        pairs = zip(argv, [*argv[1:], "--"], strict=True)
        return {
            f[2:].replace("-", "_"): True if v.startswith("--") else literal(v)
            for f, v in pairs
            if f.startswith("--")
        }

    folders = tiny_checkpoints(tmp_path)
    calls = [
        keywords([*on_this_machine(local(flags(command), folders)), *WINDOW])
        for command in PUBLISHED.values()
    ]
    assert {"mamba_scheduler_strategy", "speculative_dflash_draft_window_size"} <= set(calls[0])
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    status, lines = servers.nursery.run(str(script), json.dumps(calls), log=tmp_path / "log")
    assert status == 0, lines[-20:]
    assert json.loads(lines[-1]) == [ASKED] * len(PUBLISHED)
