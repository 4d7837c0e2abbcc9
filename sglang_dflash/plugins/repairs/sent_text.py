"""A streamed text has nothing twice."""

from __future__ import annotations

from typing import Any


def send_once(original: Any, detokenizer: Any, batch: Any) -> Any:
    """Around `DetokenizerManager._decode_batch_token_id_output`.

    Of a text that ends inside a character, the detokenizer sends a part, up to a space or to a
    Chinese character at its end. If more comes that ends inside a character, too, that part may be
    shorter: what was sent beyond it counts as not sent, and is sent once more.
    """
    known = detokenizer.decode_status
    before = {rid: known[rid].sent_offset for rid in batch.rids if rid in known}
    texts = original(detokenizer, batch)
    for rid, sent in before.items():
        if rid in known:
            known[rid].sent_offset = max(known[rid].sent_offset, sent)
    return texts
