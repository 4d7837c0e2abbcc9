"""The extensions that record confidences, outcomes and costs (`width_confidence`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments import confidence
from sglang_dflash.drafting.acceptance import Accepted
from sglang_dflash.drafting.drafter import TargetHead
from sglang_dflash.facts.draft_config import WHOLE_CONTEXT

VOCABULARY = 10


def target_worker(weight: torch.Tensor) -> Any:
    """One whose lm_head has padded rows."""
    head = SimpleNamespace(
        weight=weight, shard_indices=SimpleNamespace(num_org_elements=VOCABULARY)
    )
    return SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(lm_head=head)))


def test_what_is_recorded_of_a_step() -> None:
    torch.manual_seed(0)
    weight, hidden = torch.randn(VOCABULARY + 2, 4), torch.randn(4, 4)
    # The padding would win.
    weight[VOCABULARY:] *= 100
    extension = confidence.record(target_worker(weight))
    head = TargetHead(embed=torch.nn.Identity(), argmax=lambda _: pytest.fail("the recorder's own"))
    cache = SimpleNamespace(kv=torch.empty(0))
    options: Any = SimpleNamespace(block_size=3, reach=WHOLE_CONTEXT)
    drafter: Any = extension.make_drafter(Any, head, cache, options, Any)

    # Two requests with two drafts each.
    probabilities = (hidden @ weight[:VOCABULARY].T).softmax(-1)
    assert drafter.head.argmax(hidden).tolist() == probabilities.argmax(-1).tolist()
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid="a"), SimpleNamespace(rid="b")])
    nothing = torch.empty(0)
    taken = Accepted(lengths=torch.tensor([1, 3]), tokens=nothing, bonus=nothing)
    extension.observer.after_step(batch, Any, taken, nothing)

    assert extension.width_policy is not None
    policy = extension.width_policy(3)
    assert policy.widths == (3,)
    [(requests, accepted, shown)] = policy.report()["recorded"]
    assert (requests, accepted) == (["a", "b"], [0, 2])
    torch.testing.assert_close(
        torch.tensor(shown), probabilities.amax(-1).view(2, 2), atol=1e-4, rtol=0
    )


def test_costs_are_measured_at_every_width_that_requests_can_take() -> None:
    extension = confidence.costs(None)
    assert extension.width_policy is not None
    policy = extension.width_policy(8)
    assert {policy.choose(["a"], 100, 50) for _ in range(200)} == set(range(1, 9))
    assert {policy.choose(["a"], 100, 3) for _ in range(100)} == {1, 2, 3}
    assert policy.choose(["a"], 100, 0) == 1
    policy.took(0.004, 2, 100, 5)
    assert policy.report() == {"taken": [(2, 5, 0.004)]}
