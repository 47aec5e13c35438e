"""Three writers and three readers under kills, stops and rewinds: ring_soak.py says which."""

from __future__ import annotations

import pytest
from ring_soak import soak


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_lost_doubled_or_torn_under_40_kills(seed: int) -> None:
    did = soak(40, seed)
    assert did["kills"] >= 40
    assert did["acked"] > 100 and did["rewound"] > 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_is_lost_doubled_or_torn_under_500_kills() -> None:
    assert soak(500, 3)["kills"] >= 500
