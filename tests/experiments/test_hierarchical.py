"""Sessions of `python -m experiments hierarchical`."""

from __future__ import annotations

from experiments.hierarchical import agents
from sglang_dflash.tools.bench.datasets import stdlib_functions


def test_agents_share_prefixes() -> None:
    functions = [prompt.turns[0] for prompt in stdlib_functions()]
    found = agents(functions)
    assert len(found) == len(set(map(tuple, found))) == 16
    header = found[0][0].partition("\n# result")[0]
    assert all(turns[0].startswith(header) for turns in found)
    for one, other in zip(found[::2], found[1::2], strict=True):
        same = [a == b for a, b in zip(one, other, strict=True)]
        assert same[:2] == [True, True] and not any(same[2:])
    assert found == agents(functions)
