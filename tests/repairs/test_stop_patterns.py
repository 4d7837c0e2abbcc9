"""A stop pattern that takes exponential time costs its own request only."""

from __future__ import annotations

import hashlib
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from sglang_dflash.repairs import stop_patterns
from tests.seam.originals import original


def request(pattern: str, text: str) -> Any:
    params = SimpleNamespace(stop_strs=[], stop_regex_strs=[pattern])
    made = Req.__new__(Req)
    made.sampling_params, made.finished_reason, made.rid = params, None, "r"
    made.output_ids = [5]
    made.tail_str = lambda _accepted: text
    made._locate_str_stop_finished_len = lambda *_, **__: 1
    return made


def look(of: Any) -> Any:
    """SGLang's. Its registry of hooks replaces a function that a module keeps."""
    return original("sglang.srt.managers.schedule_batch.Req._check_str_based_finish")(of)


EXPONENTIAL = "(x+x+)+y", 60 * "x"


def test_a_pattern_takes_for_ever_without_the_row() -> None:
    with pytest.raises(stop_patterns.TooLong), stop_patterns.limit(1):
        look(request(*EXPONENTIAL))


def test_a_pattern_that_takes_too_long_ends_its_request() -> None:
    slow, began = request(*EXPONENTIAL), time.process_time()
    assert stop_patterns.find_in_time(look, slow)
    assert time.process_time() - began < 0.5
    assert isinstance(slow.finished_reason, FINISH_ABORT)
    assert slow.finished_reason.to_json()["status_code"] == 400
    assert slow.finished_reason.message.startswith("stop_regex: ['(x+x+)+y']; ")


@pytest.mark.parametrize(("text", "found"), [("a;", True), ("a", False)])
def test_others_are_looked_for_as_before(text: str, found: bool) -> None:
    usual = request("[a-z];", text)
    assert stop_patterns.find_in_time(look, usual) is found
    assert (usual.finished_reason is not None) is found
    # The limit is over.
    began = time.process_time()
    while time.process_time() - began < 2 * stop_patterns.FIRST:
        pass


def test_other_threads_do_not_count() -> None:
    """Such as those of a forward, which may be busy for a while after it."""
    ended = threading.Event()

    def busy() -> None:
        while not ended.is_set():
            hashlib.sha256(bytes(1 << 24))

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for one in threads:
        one.start()
    try:
        with stop_patterns.limit(stop_patterns.FIRST):
            time.sleep(8 * stop_patterns.FIRST)
    finally:
        ended.set()
        for one in threads:
            one.join()


def test_looks_that_are_slow_each_time_end_their_request_too() -> None:
    """Each takes an eighth of the time: no single one is too long."""
    slow, looks = request("a", "b"), 0

    def an_eighth(_of: Any) -> bool:
        began = time.thread_time()
        while time.thread_time() - began < stop_patterns.FIRST / 8:
            pass
        return False

    while not stop_patterns.find_in_time(an_eighth, slow):
        looks, slow.output_ids = looks + 1, [*slow.output_ids, 5]
        assert looks < 1000
    assert looks > 1 and isinstance(slow.finished_reason, FINISH_ABORT)
