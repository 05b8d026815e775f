"""Every row of the kernel table does what its op means: NumPy's evaluation of a network of the one node is the oracle.

The cases are the harness's samples, which reach every row (`tests/bench/test_manifest.py`), in each type that their op
has and between all native layouts. Operands and results are between pages that nobody may touch; the padding of sources
is dirty, and the padding of results has to be zero.
"""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np
import pytest
from eltwise_lab import compare, compare_halves, place
from guarded import Guarded, available
from storage_oracle import Array

import blockconv as bc
from bench.manifest_cases import PAIRS, Node, cases
from bench.manifest_worker import candidates_of
from blockconv.core.types import FLOATS, NUMBERS, element
from blockconv.network import ops
from blockconv.network.builder import NetworkBuilder
from blockconv.network.graph import Network
from blockconv.network.planning.binding import OUTPUT, Workspace, bind
from blockconv.network.planning.candidates import Candidate
from blockconv.network.planning.parameters import Parameters
from blockconv.runtime import Program, address_of

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

SAMPLES = [case for case in cases(quick=False) if isinstance(case, Node) and case.every]
ARENAS = [Guarded(1 << 20) for _ in range(5)] if available() else []


def drawn(shape: tuple[int, ...], dtype: str, seed: str) -> Array:
    """Small whole numbers: few sums of their products are rounded. As indices they are inside."""
    low = 0 if element(dtype).bounds[0] == 0 or dtype == "int64" else -3
    numbers = np.random.default_rng(zlib.crc32(seed.encode())).integers(low, 2 if dtype == "bool" else 4, shape)
    return numbers.astype(element(dtype).dtype)


def network_in(case: Node, dtype: str) -> Network | None:
    """The network of the case's node with all inputs of this type; None if the op does not take it."""
    builder = NetworkBuilder()
    try:
        inputs = [builder.input(f"x{k}", shape, dtype) for k, shape in enumerate(case.inputs)]
        given = [drawn(shape, dtype, f"{case.name} {k}") for k, shape in enumerate(case.parameters)]
        builder.output(builder.add(case.attributes, *inputs, parameters=tuple(given)))
        return builder.build()
    except bc.BlockconvError:
        return None


@pytest.mark.parametrize("case", SAMPLES, ids=lambda case: f"{case.name} {case.dtype}")
@pytest.mark.sampled(4)
def test_every_row_does_what_its_op_means(case: Node) -> None:
    reached = set()
    for dtype in dict.fromkeys((case.dtype, *types_of(case))):
        network = network_in(case, dtype)
        for candidate in [] if network is None else ways(dataclasses.replace(case, dtype=dtype, pairs=PAIRS), network):
            check(network, candidate, dtype)
            reached.add(dtype)
    assert case.dtype in reached


def types_of(case: Node) -> tuple[str, ...]:
    """The types beside the case's own. Windows have samples of their own, and integers of other ops a quantization."""
    if isinstance(case.attributes, ops.Conv2d | ops.ConvTranspose2d | ops.Pool2d):
        return ()
    return FLOATS if isinstance(case.attributes, ops.Activate | ops.Affine | ops.AdaptivePool2d) else NUMBERS


def ways(case: Node, network: Network) -> list[Candidate]:
    """Every row that takes it, and its layouts; none if no kernel is for the type."""
    try:
        return [*candidates_of(case, network)]
    except bc.UnsupportedError:
        return []


def check(network: Network, candidate: Candidate, dtype: str) -> None:
    (node,), row = network.nodes, candidate.row
    assert row is not None
    given = [drawn(tensor.shape, dtype, tensor.name) for tensor in network.inputs]
    (wanted,) = network.evaluate(dict(zip(node.inputs, given, strict=True))).values()
    dirt = np.nan if element(dtype).is_float else 99
    before = [place(x, layout.tag, dirt) for x, layout in zip(given, candidate.srcs, strict=True)]
    after = place(wanted, candidate.dst.tag, 0)
    launches, operands = bind(network, node, candidate, Parameters(network), 1)
    for where in ("end", "start"):
        *sources, target = (arena.take(x.nbytes, where) for arena, x in zip(ARENAS, (*before, after), strict=False))
        for source, x in zip(sources, before, strict=True):
            source[:] = x.view(np.uint8)
        target[:] = 0xC3
        places = {OUTPUT: target, **dict(enumerate(sources))}
        memory = [np.zeros(x.nbytes, np.uint8) if isinstance(x, Workspace) else x for x in operands]
        buffers = [places[x] if isinstance(x, int) else x for x in memory]
        Program(launches).run([*map(address_of, buffers)], 2)
        what = f"{row.name}, {candidate.srcs} to {candidate.dst}, {dtype}, against the {where}"
        found = target.view(after.dtype)
        if element(after.dtype).is_half:
            compare_halves(found, after, what)
        else:
            compare(found, after, not element(after.dtype).is_float, 1e-3 if row.error else 1e-5, what, None)
        assert all(arena.intact() for arena in ARENAS), f"{what}: wrote outside"
        assert all(map(np.array_equal, sources, (x.view(np.uint8) for x in before))), f"{what}: wrote to a source"
