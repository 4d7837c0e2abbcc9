"""`max_output_tokens` of `/v1/responses`."""

from __future__ import annotations

from sglang.srt.entrypoints.openai.protocol import ResponsesRequest

from sglang_dflash.plugins.repairs.responses import restore_budget
from tests.patches.originals import original

TO_PARAMS = "sglang.srt.entrypoints.openai.protocol.ResponsesRequest.to_sampling_params"


def test_two_tokens_are_missing_without_the_row() -> None:
    for asked, sglangs in ((1, -1), (2, 0), (64, 62)):
        request = ResponsesRequest(input="x", max_output_tokens=asked)
        params = original(TO_PARAMS)(request, None, {})
        assert params["max_new_tokens"] == sglangs
        assert restore_budget(params, request, None, {})["max_new_tokens"] == asked
    # As many as there is room for, or as the model's generation_config.json allows.
    request = ResponsesRequest(input="x")
    for default in (None, 30):
        params = original(TO_PARAMS)(request, None, {"max_new_tokens": default})
        assert restore_budget(params, request, None, {})["max_new_tokens"] == default
