"""Whether memory still has its contents, by hashes of a few of its lines at each call.

A line is 64 bytes: processors read no less at once. Each span of memory has hashes of `MOST` lines at most, which are
spread over the span. A call compares `EACH` of these lines of each span, and other ones than the call before. So the
next call sees a write of a whole span. A write of a part is seen after `MOST / EACH` calls at most, if it touches one
of the lines.
"""

import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from blockconv import jit
from blockconv.core.checks import Pair
from blockconv.jit.arguments import Arguments, address, in_bytes, table, word
from blockconv.jit.ir import load_bits, load_i64, prefetch, store_i64
from blockconv.runtime.memory import address_of

LINE = 64  # bytes
EACH = 4  # lines of a span that a call compares
MOST = 1024  # lines of a span that have a hash
FACTOR = 0x1B873593CC9E2D51  # odd, so that a multiplication by it is invertible
SHIFT, KEPT = 17, (1 << 47) - 1  # copies a sign to a distant bit: changes of signs would cancel in the sum


class SpanArgs(Arguments):
    """The lines of a span that have a hash."""

    first = address("the span")
    last = address("the last line")
    width = word("bytes of a line")
    step = in_bytes("from a line to the next")
    phases = word("calls until all lines were compared")
    phase = word("of the next call")
    hashes = address("`EACH` hashes for each phase")


class LinesArgs(Arguments):
    """All spans. Threads may share a block: each word that the kernel writes is right for all of them."""

    keeps = word("1: compute all hashes; 0: compare those of one phase")
    differ = word("1: a line has another hash")
    count = word("spans")
    spans = table(SpanArgs, meaning="the spans")


def hash_of(address: int, width: int) -> int:
    """A hash of a line's bytes. Lines that differ in a single word always have different hashes."""
    found, factor = width, FACTOR
    for at in range(0, width - 7, 8):
        word = load_bits(address + at, 8)
        found += (word ^ ((word >> SHIFT) & KEPT)) * factor
        factor *= FACTOR
    for at in range(width // 8 * 8, width):
        found += load_bits(address + at, 1) * factor
        factor *= FACTOR
    return found


def line_of(span: Any, phase: int, i: int) -> int:
    """The address of a line that a phase compares."""
    return int(min(span.first + (phase + i * span.phases) * span.step, span.last))


@jit.kernel
def compare_lines() -> Callable[..., None]:
    """The kernel's only argument is the address of the `LinesArgs`."""

    def kernel(a: LinesArgs) -> None:
        keeps, count = a.keeps, a.count
        for k in range(0 if keeps else count):  # prefetch all lines first: memory serves many requests at once
            span = a.spans[k]
            phase = span.phase
            prefetch(span.hashes + 8 * EACH * phase)
            for i in range(EACH):
                prefetch(line_of(span, phase, i))
        for k in range(count):
            span = a.spans[k]
            begin, phases = span.phase, span.phases
            for phase in range(begin, phases if keeps else begin + 1):
                for i in range(EACH):
                    found, index = hash_of(line_of(span, phase, i), span.width), EACH * phase + i
                    if keeps:
                        store_i64(span.hashes, index, found)
                    elif load_i64(span.hashes, index) != found:
                        a.differ = 1
            span.phase = 0 if keeps or begin + 1 == phases else begin + 1

    return kernel


@functools.cache
def _compare() -> Callable[[int], object]:
    """The kernel, called with the GIL held: it takes as long as a switch of threads."""
    return ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(compare_lines().address)


class Fingerprint(jit.Addressed):
    """The present contents of spans of memory. The caller keeps the memory alive."""

    __slots__ = ("_address", "_block", "_hashes", "_words")

    def __init__(self, spans: Iterable[Pair]) -> None:
        """spans: the address and the bytes of each."""
        found = [_lines(address, nbytes) for address, nbytes in spans if nbytes]
        sizes = [EACH * span["phases"] for span in found]
        self._hashes = np.empty(sum(sizes), np.int64)
        ends = np.cumsum([0, *sizes]).tolist()
        each = [
            SpanArgs(**span, phase=0, hashes=address_of(self._hashes) + 8 * at)
            for span, at in zip(found, ends, strict=False)
        ]
        self._block = np.array(LinesArgs(keeps=1, differ=0, count=len(each), spans=each), np.int64)
        self._words, self._address = self._block.data, address_of(self._block)
        if each:
            _compare()(self._address)
        self._words[0] = 0

    def differs(self) -> bool:
        """Whether a line of this call, or of an earlier one, has changed."""
        if self._words[2]:
            _compare()(self._address)
        return bool(self._words[1])


def _lines(address: int, nbytes: int) -> dict[str, int]:
    """The lines of a span, for `SpanArgs`: the last one may overlap the one before."""
    width, lines = min(LINE, nbytes), -(-nbytes // LINE)
    step = -(-lines // MOST)
    phases = -(-lines // (step * EACH))
    return {"first": address, "last": address + nbytes - width, "width": width, "step": LINE * step, "phases": phases}
