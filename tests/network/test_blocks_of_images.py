"""Plans in layouts that have images in blocks: every op between the network's two ends runs in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_networks import residual_network, values

import blockconv as bc
from blockconv.core.activation import activation
from blockconv.network import ops

pytestmark = pytest.mark.filterwarnings("error::blockconv.SlowPathWarning")


def between_network(n: int) -> bc.Network:
    """The ops between convolutions, some of which make something else of zero; ragged channels."""
    b = bc.NetworkBuilder("between")
    x = b.conv2d(b.input("x", (n, 12, 6, 5)), values((20, 12, 1, 1), 1), name="conv")
    y = b.add(ops.Activate(activation("sigmoid")), x, name="activation")
    y = b.add(ops.Concat(), x, y, x, name="concat")
    y = b.add(ops.Pad(((0, 0), (0, 0), (1, 0), (0, 2)), 0.5), y, name="pad")
    y = b.add(ops.Slice(1, 3, 24, 2), y, name="slice")
    y = b.add(ops.Shuffle(4), y, name="shuffle")
    y = b.add(ops.Resize("nearest", size=(9, 8)), y, name="resize")
    y = b.add(ops.Softmax(1), y, name="softmax")
    y = b.add(ops.Lrn(3), y, name="lrn")
    mean = b.add(ops.ReduceMean((2, 3)), y, name="mean")
    b.output(b.add(ops.Binary("sub"), y, mean, name="binary"))
    return b.build()


def written(plan: bc.Plan) -> set[str]:
    """The layouts of images that nodes write."""
    return {a.writes[1].name for a in plan.actions if a.node is not None and a.writes[1].ndim == 4}


def held_to(network: bc.Network, layouts: Any, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What a plan gives all of whose nodes write one of the layouts."""
    plan = bc.compile(network, layouts, threads=1)
    assert written(plan) <= ({layouts} if isinstance(layouts, str) else set(layouts))
    found: np.ndarray[Any, Any] = plan(x)
    return found


@pytest.mark.parametrize("n", [5, 18])  # less than a block, a block and some
def test_a_network_of_floats(n: int) -> None:
    network, x = residual_network(n), values((n, 3, 12, 12))
    wanted = network.evaluate(x)["flat"]
    for layouts in ("bsv16_fsv16", ["bsv32_fsv32", "bsv16_fsv16"]):
        found = held_to(network, layouts, x)
        assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("n", [16, 18])
def test_the_ops_between(n: int) -> None:
    network, x = between_network(n), values((n, 12, 6, 5))
    wanted = network.evaluate(x)["binary"]
    for layout in ("bsv16_fsv16", "bsv32_fsv32"):
        np.testing.assert_allclose(held_to(network, [layout], x), wanted, atol=1e-6)


@pytest.mark.slow
def test_a_network_of_integers() -> None:
    x = values((18, 3, 12, 12))
    network = bc.quantize(residual_network(18), [x])
    for layout in ("bsv16_fsv16", "bsv32_fsv32"):
        np.testing.assert_array_equal(held_to(network, [layout], x), network.evaluate(x)["flat"])
