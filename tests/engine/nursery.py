"""Servers forked from one process that has SGLang's modules imported: a start takes seconds.

A server started from the command line imports SGLang three times, once per process, which is most
of its start. Here it is forked before anything has been configured; what runs then is the code of
`python -m sglang.launch_server`. Servers as a user starts them, from the command line, are tested
in test_as_installed.py.

Other commands that would import SGLang first, `Nursery.run` forks in the same way.

Protocol, one JSON value per line: `{"module", "args", "env", "log"}` is answered with a process id;
a process id with its exit status, or null while it runs. A module may be a Python file, too.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from sglang_dflash.tools.bench.server import Server

NURSERY = "tests.engine.nursery"
_SCHEDULER = "sglang.srt.managers.scheduler"
IMPORTED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    _SCHEDULER,
    "sglang.srt.managers.detokenizer_manager",
    # All models. SGLang's hooks reach names that were imported before, too.
    "sglang.srt.models.registry",
)
_BINDINGS = "tests.engine.bindings"
# The variable that names a folder of the whole test session (see tests/conftest.py, which this
# process need not import).
SHARED_FOLDER = "SGLANG_DFLASH_TEST_FOLDER"


def serve(module: str, args: list[str], env: dict[str, str], log: str) -> None:
    """Become the process that `python -m module args` would be, in the forked child."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(out, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    os.environ.clear()
    os.environ.update(env)
    read_environment(metrics="--enable-metrics" in args)
    multiprocessing.set_start_method("fork", force=True)
    # SGLang asks for "spawn", which imports everything again.
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    sys.argv = [module, *args]
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def read_environment(metrics: bool) -> None:
    """Set what SGLang and prometheus_client read from the environment when they are imported."""
    scheduler, environ = map(importlib.import_module, (_SCHEDULER, "sglang.srt.environ"))
    for name in ("TEST_RETRACT", "TEST_RETRACT_INTERVAL"):
        setattr(scheduler, name, getattr(environ.envs, f"SGLANG_{name}").get())
    if metrics:
        # SGLang makes such a folder if there is none, but after this.
        folder = tempfile.mkdtemp(dir=os.environ.get(SHARED_FOLDER))
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        values: Any = importlib.import_module("prometheus_client.values")
        values.ValueClass = values.get_value_class()


def _be(asked: dict[str, Any]) -> NoReturn:
    """Run in the forked child, and end as Python would, without its clean-up of this process."""
    code = 1
    try:
        serve(**asked)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def prepare() -> None:
    """Import what servers need, and read the names to which they propagate hooks."""
    for name in (*IMPORTED, _BINDINGS):
        importlib.import_module(name)
    sys.modules[_BINDINGS].read_once()


def main() -> None:
    prepare()
    # A server searches for garbage whenever it measures memory: not among what is imported here.
    gc.freeze()
    # Ctrl-C reaches the whole process group. This process ends with the one that asks, however that
    # ends, and then all that it has forked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    running = set[int]()
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            pid, status = os.waitpid(asked, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            running.discard(pid)
        else:
            answer = os.fork()
            if answer == 0:
                _be(asked)
            running.add(answer)
        print(json.dumps(answer), flush=True)
    for pid in running:
        # The first fails if the child has no process group yet.
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)


class Nursery:
    """The process itself.

    Args:
        module: what it runs, with arguments: this module, or one that changes the process first.
    """

    def __init__(self, module: Sequence[str] = (NURSERY,)) -> None:
        command = [sys.executable, "-W", "ignore", "-m", *module]
        # torch reads it when it is imported: what a child sets comes too late.
        threads = str(max(1, (os.cpu_count() or 1) - 1))
        env = {"OMP_NUM_THREADS": threads, **os.environ}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def ask(self, what: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def run(self, module: str, *args: str, log: Path, **env: str) -> tuple[int, list[str]]:
        """Run a command to its end, in this process's environment and `env`: its exit status, and
        the lines of stdout and stderr together."""
        asked = {"module": module, "args": args, "env": {**os.environ, **env}, "log": str(log)}
        process = Forked(self, **asked)
        try:
            status = process.wait(timeout=600)
        finally:
            if process.poll() is None:
                process.kill()
        return status, log.read_text().splitlines()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Forked:
    """A child of the nursery, with the part of `subprocess.Popen` that `Server` uses."""

    def __init__(self, nursery: Nursery, **asked: Any) -> None:
        self._nursery, self.returncode = nursery, None
        self.pid = nursery.ask(asked)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("server", timeout or 0)
            time.sleep(0.05)
        return code

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class ForkedServer(Server):
    """A `Server` whose process the nursery forks."""

    def __init__(self, nursery: Nursery, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._nursery = nursery

    def start(self) -> None:
        # `wait` reads it, perhaps before the child has opened it.
        self.log.touch()
        _python, _m, module, *args = self.config.command(self.port)
        env = self.config.environment()
        self.process = Forked(self._nursery, module=module, args=args, env=env, log=str(self.log))

    def stop(self) -> None:
        """Kill it. An orderly end takes 5 to 30 s; test_as_installed.py tests it."""
        self._end_session()


if __name__ == "__main__":
    main()
