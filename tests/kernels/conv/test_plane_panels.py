"""Tiles whose pixels are packed from planes, channel by channel, though they could be read where they are."""

from __future__ import annotations

from collections.abc import Iterator

import guarded
import pytest
from conv_lab import Paged, check, data

from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.kernels.common.request import Request
from blockconv.kernels.conv import blocking as direct
from blockconv.kernels.conv.rows import DIRECT

# Steps of 16 channels with and without a rest, a rest alone; groups; one row that is wider than a tile.
PROBLEMS = (
    "mb2ic37ih7oc200kh1",
    "mb1ic32ih5iw9oc330kh1kw1",
    "mb1ic5ih7oc200kh1",
    "g2mb2ic42ih5oc400kh1",
    "mb3ic48ih1iw23oc300kh1kw1",
)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wherever planes could be read where they are, on processors too that gain nothing by it."""
    monkeypatch.setattr(direct, "pays_to_pack_planes", lambda isa, src, ocbs: src.length == 1)
    direct.blocking.cache_clear()
    yield
    direct.blocking.cache_clear()


def blocking(descriptor: str, dst: str, dtype: str = "float32") -> direct.ConvBlocking:
    p = Conv2dProblem.from_descriptor(descriptor)
    return direct.blocking(Request(p, Layout("NCHW"), Layout(dst), Types.all(dtype)))


def each(descriptor: str, kind: str, dtype: str = "float32", **options: bool) -> None:
    p = Conv2dProblem.from_descriptor(descriptor)
    given = data(p, kind, dtype, **options)
    for threads, dst in enumerate(("NCHW", "NHWC", "NCHW4", "NCHW16"), start=1):
        assert blocking(descriptor, dst, dtype).has_panels_of_planes
        check(DIRECT, p, "NCHW", dst, given, exact=kind == "integers", threads=threads)


@pytest.mark.isa
@pytest.mark.parametrize("descriptor", PROBLEMS)
@pytest.mark.sampled(2)
def test_it_computes_what_it_should(descriptor, always):
    """Exact on small integers; canaries round every buffer. NaN and infinity go where the definition sends them."""
    each(descriptor, "integers", residual=True)
    each(descriptor, "floats", specials=True)


def test_float64(always):
    each(PROBLEMS[0], "integers", "float64", residual=True)


def test_steps_in_blocks(always, monkeypatch):
    """As where weights push each other out of the second-level cache: a reduction is blocks of steps, with a rest."""
    monkeypatch.setattr(target, "second_level_cache", lambda: 8 << 10)
    assert blocking(PROBLEMS[0], "NCHW").k_blocks > 1
    each(PROBLEMS[0], "integers", residual=True)


@pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
@pytest.mark.parametrize("where", ["start", "end"])
def test_nothing_is_touched_beyond_the_arrays(where, always):
    """In pages that no one may touch on one side, where a wrong access ends the process."""
    p = Conv2dProblem.from_descriptor(PROBLEMS[0])
    check(DIRECT, p, "NCHW", "NCHW", data(p), exact=True, memory=Paged(where))


def test_it_is_chosen_where_many_output_channels_share_what_is_packed():
    """Rows of 49 floats begin anywhere in a cache line, and each step would wait; vectors of 512 bits hide that."""
    wide = target.isa().vector_bytes == 64
    assert blocking("mb1ic2048ih7oc512kh1", "NCHW").has_panels_of_planes is not wide
    assert blocking("mb1ic2048ih7oc512kh1", "NCHW").in_place is wide
    assert not blocking("mb1ic2048ih7oc16kh1", "NCHW").has_panels_of_planes
