"""Networks whose weights do not stay in the last cache: an op takes no less than its weights' way from memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import blockconv as bc
from blockconv.machine.machine import host
from blockconv.network.planning import planned


def _plan() -> bc.Plan:
    b = bc.NetworkBuilder("late layer")
    x = b.input("x", (1, 256, 7, 7))
    b.output(b.conv2d(x, np.zeros((256, 256, 3, 3), np.float32), padding=1, name="conv"))
    return bc.compile(b.build(), layouts="NCHW16")


@pytest.mark.parametrize(("last_cache", "kept"), [(1 << 40, True), (1 << 20, False)])
def test_weights_from_memory_bound_an_op(last_cache: int, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """F(4x4) multiplies least, and packs four times the weights: from a slow memory they take longer than the rest."""
    known = host().profile
    slow = dataclasses.replace(
        known, caches={**known.caches, "L3": last_cache}, reads={**known.reads, "memory": known.reads["memory"] / 100}
    )
    monkeypatch.setattr(planned, "host", lambda: dataclasses.replace(host(), profile=slow))
    conv = next(action for action in _plan().actions if action.name == "conv")
    assert ("winograd" in conv.kernel) == kept
    direct_bytes = 4 * 9 * 256**2
    assert (conv.cost > direct_bytes / slow.reads["memory"]) == (not kept)
