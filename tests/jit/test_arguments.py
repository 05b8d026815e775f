"""Argument blocks: the same machine code as words by index, names that are checked, records, groups, tables."""

from __future__ import annotations

import copy
import ctypes
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from llvmlite import ir

from blockconv.core.types import ElementType, element
from blockconv.jit.arguments import Arguments, group, held, in_bytes, table, word
from blockconv.jit.compiler import generate, link
from blockconv.jit.ir import call_kernel, emitted, load_i64, store_i64
from blockconv.jit.records import fields_of, fill, integers_of, parameters_of
from blockconv.jit.values import KernelError, build
from blockconv.runtime import Buffer, address_of


class Pixels(Arguments):
    """Where the pixels of an array lie."""

    row = word("from a row to the next", "bytes")
    col = word("from a pixel to the next", "bytes")


class Loop(Arguments):
    """A loop around a kernel."""

    size = word("how often it runs", "iterations")
    step = word("from one iteration to the next", "bytes")


class Copy(Arguments):
    """What copies an image."""

    src = word("the first pixel", "address")
    oh = word("rows of the destination", "rows")
    count = word("a name that tuples have too")
    of_src = group(Pixels, "of the source")
    of_dst = group(Pixels)
    outer = table(Loop, 2)


class LongerCopy(Copy):
    """A copy that does more."""

    more = word("what it does more", "0 or 1")
    loops = table(Loop)


class Entry(Arguments):
    """An entry of a table in memory."""

    weight = word("by which it counts")
    value = word("what it is")


BLOCK = {
    "src": 10, "oh": 11, "count": 12, "of_src": Pixels(row=20, col=21), "of_dst": Pixels(row=30, col=31),
    "outer": [Loop(size=2, step=40), Loop(size=3, step=50)],
}  # fmt: skip


def run(body: Any, block: np.ndarray) -> None:
    """Compile a kernel's body, and call it with the address of a block."""
    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(link("tested", generate("tested", body).object))
    kernel(address_of(block), 0, 0, 0)


# ---------------------------------------------------------------- in Python


class Entry2(Arguments):
    """A block that shares a word's name with `Entry`."""

    weight = word("another")


def test_words_are_in_the_order_of_the_declaration() -> None:
    assert Copy(**dict(reversed(BLOCK.items()))) == (10, 11, 12, 20, 21, 30, 31, 2, 40, 3, 50)
    assert Copy.nbytes == 8 * 11
    assert LongerCopy(**BLOCK, more=1, loops=[Loop(size=7, step=8)])[11:] == (1, 7, 8)
    assert LongerCopy.nbytes == 8 * 12, "without the table of any length"


def test_words_are_ints_or_what_becomes_an_address() -> None:
    src = Buffer(3, 64)
    entry = Entry(weight=np.bool_(True), value=np.int32(7))
    assert entry == (1, 7)
    assert [type(x) for x in entry] == [int, int]
    assert Entry(weight=True, value=src)[1] is src
    for wrong in (1.5, np.float32(2), "3", None, (1,), np.arange(2), Entry(weight=0, value=0)):
        with pytest.raises(TypeError, match=r"Entry: value is one integer"):
            Entry(weight=1, value=wrong)


def test_a_block_is_read_by_name_and_extended_and_changed() -> None:
    block = Copy(**BLOCK)
    assert (block.oh, block.count, block.of_dst.col, block.outer[1].step) == (11, 12, 31, 50)
    assert LongerCopy(**block._asdict(), more=1, loops=[])[:11] == block
    longer = LongerCopy(**BLOCK, more=1, loops=[Loop(size=7, step=8), Loop(size=9, step=10)])
    assert [loop.size for loop in longer.loops] == [7, 9]
    changed = block._replace(oh=5)
    assert (changed.oh, changed.src) == (5, 10)
    assert repr(Entry(weight=1, value=Buffer(0))) == "Entry(weight=1, value=Buffer(index=0, offset=0))"
    for again in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert again == block
        assert type(again) is Copy
    with pytest.raises(AttributeError):
        block.oh = 3


def test_names_are_checked() -> None:
    with pytest.raises(TypeError, match=r"Entry has no word 'valve'; did you mean 'value'\?"):
        Entry(weight=1, valve=2)
    with pytest.raises(TypeError, match=r"Copy: missing src, of_dst$"):
        Copy(**{name: value for name, value in BLOCK.items() if name not in ("src", "of_dst")})
    with pytest.raises(TypeError, match=r"multiple values for keyword argument 'weight'"):
        Entry(weight=1, **Entry(weight=2, value=3)._asdict())
    with pytest.raises(TypeError, match=r"Entry: a block is read at an address by kernels alone"):
        Entry(4096)
    with pytest.raises(TypeError, match=r"Copy: of_src is Pixels\(\.\.\.\); it is given Loop\(size=1, step=2\)"):
        Copy(**{**BLOCK, "of_src": Loop(size=1, step=2)})
    with pytest.raises(TypeError, match=r"LongerCopy: loops is any number of Loop"):
        LongerCopy(**BLOCK, more=1, loops=[Entry(weight=1, value=2)])
    with pytest.raises(TypeError, match=r"Copy: outer is 2 of Loop\(\.\.\.\); it is given \[\]"):
        Copy(**{**BLOCK, "outer": []})


class Both(Pixels, Entry):
    """The words of two blocks, and one more."""

    more = word("one more")


def test_a_block_may_inherit_from_several() -> None:
    both = Both(row=1, col=2, weight=3, value=4, more=5)
    assert both == (1, 2, 3, 4, 5)
    assert (both.value, Both.value.first, Entry.value.first) == (4, 3, 1)
    assert isinstance(both, Entry)
    assert fill(Both, Pixels(row=1, col=2), Entry(weight=3, value=4), more=5) == both
    with pytest.raises(TypeError, match=r"Same: word 'weight' is declared by the class that it inherits from"):

        class Same(Entry, Entry2):
            """Two blocks with a word of one name."""


class Default(Arguments):
    """A block with words that need not be given."""

    first = word("given")
    second = in_bytes("or not", 7)


def test_a_word_may_have_a_default() -> None:
    assert (Default(first=1), Default(first=1, second=2)) == ((1, 7), (1, 2))
    with pytest.raises(TypeError, match=r"Default: missing first$"):
        Default(second=2)


# ---------------------------------------------------------------- records


class Tile(NamedTuple):
    """The shape of a tile."""

    row: int
    vectors: int = 1


@dataclass(frozen=True)
class Blocking:
    """How something is cut."""

    value: int
    col: int

    @property
    def weight(self) -> int:
        return self.value + 1


def test_a_record_is_filled_from_others_by_name() -> None:
    assert fill(Entry, Blocking(4, 8)) == Entry(weight=5, value=4)
    assert fill(Pixels, Blocking(4, 8), Tile(2)) == Pixels(row=2, col=8)
    assert fill(Pixels, Blocking(4, 8), Tile(2), col=9) == Pixels(row=2, col=9)
    assert fill(Tile, Pixels(row=3, col=4)) == Tile(3, 1)
    assert fill(Blocking, Pixels(row=3, col=4), Entry(weight=1, value=2)) == Blocking(2, 4)
    with pytest.raises(TypeError, match=r"Pixels: row is given by Tile, Pixels"):
        fill(Pixels, Tile(1), Pixels(row=3, col=4))
    with pytest.raises(TypeError, match=r"Pixels: missing col"):
        fill(Pixels, Tile(1))
    with pytest.raises(TypeError, match=r"Pixels has no word 'colu'; did you mean 'col'\?"):
        fill(Pixels, Tile(1), colu=2)


def test_a_family_takes_records_as_integers() -> None:
    def build(tile: Tile, cut: Blocking, plain: int, last: int = 0) -> Any: ...

    given = Tile(2, 3), Blocking(4, 5), True
    assert [*integers_of(given)] == [2, 3, 4, 5, 1]
    assert [*parameters_of(build, [2, 3, 4, 5, 1])] == [*given]
    assert [*parameters_of(build, [2, 3, 4, 5, 1, 6])] == [*given, 6]
    assert [*parameters_of(lambda *numbers: None, [1, 2])] == [1, 2]
    assert (fields_of(Copy)[:2], fields_of(int)) == (("src", "oh"), ())


class Copied(NamedTuple):
    """What is copied."""

    src: ElementType
    is_whole: bool


def test_a_family_takes_element_types_and_flags_as_integers() -> None:
    def build(kind: ElementType, copied: Copied, flag: bool, number: int, last: bool = False) -> Any: ...

    half, byte = element("bfloat16"), element("uint8")
    given = half, Copied(byte, True), False, 3
    assert [*integers_of(given)] == [half.code, byte.code, 1, 0, 3]
    found = [*parameters_of(build, integers_of(given))]
    assert found == [*given]
    assert [type(x) for x in (found[1].is_whole, found[2], found[3])] == [bool, bool, int]


def test_declarations_are_checked() -> None:
    with pytest.raises(TypeError, match=r"word 'a' is declared twice"):

        class Twice(Arguments):
            a = word("one")
            a = word("another")  # noqa: PIE794

    with pytest.raises(TypeError, match=r"Again: word 'value' is declared by the class that it inherits from"):

        class Again(Entry):
            value = word("another")

    for name in ("address", "nbytes", "load", "_hidden"):
        with pytest.raises(TypeError, match=f"Reserved: no word can be called {name!r}"):
            type(Entry)("Reserved", (Arguments,), {name: word("one")})
    with pytest.raises(TypeError, match=r"After: 'late' comes after a table of any length"):

        class After(LongerCopy):
            late = word("one")

    with pytest.raises(TypeError, match=r"LongerCopy ends with a table of any length"):
        group(LongerCopy)


def test_words_say_what_they_are() -> None:
    assert (Default.second.unit, Default.second.default, Default.first.unit) == ("bytes", 7, "")
    assert (Copy.src.meaning, Copy.src.unit, Copy.oh.unit) == ("the first pixel", "address", "rows")
    assert [(name, field.first, field.unit) for name, field in LongerCopy.fields.items()] == [
        ("src", 0, "address"),
        ("oh", 1, "rows"),
        ("count", 2, ""),
        ("of_src", 3, ""),
        ("of_dst", 5, ""),
        ("outer", 7, ""),
        ("more", 11, "0 or 1"),
        ("loops", 12, ""),
    ]


# ---------------------------------------------------------------- in kernels


def offset_by_index(pixels, h, w):
    return h * load_i64(pixels, 0) + w * load_i64(pixels, 1)


def offset_by_name(pixels, h, w):
    return h * pixels.row + w * pixels.col


def test_machine_code_is_that_of_words_by_index() -> None:
    """Words, groups, a helper that is given a group, a record, a table inside a block, and one in memory."""

    def by_index(args, first, last, scratch):
        for i in range(first, last):
            at = load_i64(args, 0) + offset_by_index(args + 8 * 5, i, load_i64(args, 1))
            for k in range(2):
                loop = args + 8 * 7 + 16 * k
                at += i % load_i64(loop, 0) * load_i64(loop, 1)
            entry = at + i * 16
            store_i64(scratch + 640, 1, load_i64(entry, 1) + load_i64(args, 4))
            store_i64(scratch + 640, 0, load_i64(args, 11))
            call_kernel(load_i64(args, 2), args, scratch + 640, 0, 0)

    def by_name(args, first, last, scratch):
        a = LongerCopy(args)
        for i in range(first, last):
            at = a.src + offset_by_name(a.of_dst, i, a.oh)
            for k in range(2):
                loop = a.outer[k]
                at += i % loop.size * loop.step
            entry = Entry(at + i * Entry.nbytes)
            record = Entry(scratch + 640)
            record.value = entry.value + a.of_src.col
            record.weight = a.more
            call_kernel(a.count, a.address, record.address, 0, 0)

    named, indexed = generate("same", by_name), generate("same", by_index)
    assert named.asm() == indexed.asm()
    assert named.object == indexed.object


def test_kernels_read_and_write() -> None:
    def body(args, first, last, scratch):
        a = LongerCopy(args)
        out = Entry(a.src)
        out.weight = a.oh + a.of_src.row * a.outer[1].step
        out.value = a.loops[0].size + a.loops[a.more].step
        out[1].weight = Copy.nbytes
        Entry(a.src + Entry.nbytes).value = a.address

    out = np.zeros(4, np.int64)
    words = LongerCopy(**{**BLOCK, "src": address_of(out)}, more=1, loops=[Loop(size=7, step=8), Loop(size=9, step=60)])
    block = np.array(words, np.int64)
    run(body, block)
    assert out.tolist() == [11 + 20 * 50, 7 + 60, 8 * 11, address_of(block)]


def test_a_held_block_is_loaded_once() -> None:
    """Its words stay as they were when it was made; groups of them, and LLVM code, have them too."""

    @emitted
    def write(a: Any, out: Any) -> None:
        words = build.inttoptr(out, ir.IntType(64).as_pointer())
        build.store(build.add(a.oh, a.of_dst.row), build.gep(words, [ir.Constant(ir.IntType(64), 2)]))

    def body(args, first, last, scratch):
        view = Copy(args)
        a, out = held(view), view.src
        view.oh = 77
        store_i64(out, 0, a.oh + view.oh)
        store_i64(out, 1, a.of_src.col - (a.of_dst.address - a.address))
        write(a, out)

    out = np.zeros(3, np.int64)
    run(body, np.array(Copy(**{**BLOCK, "src": address_of(out)}), np.int64))
    assert out.tolist() == [11 + 77, 21 - 8 * 5, 11 + 30]

    def reads_table(args, first, last, scratch):
        store_i64(scratch, 0, held(Copy(args)).outer[0].size)

    with pytest.raises(KernelError, match=r"Copy is in registers, where no outer\[k\] is"):
        generate("reads_table", reads_table)


def next_entry(entry):
    return Entry(entry.address + Entry.nbytes)


def test_views_are_values() -> None:
    """One comes out of a helper, one out of either branch, and one goes round a loop."""

    def body(args, first, last, scratch):
        a = Entry(args)
        if a.weight > 0:
            chosen = next_entry(a)
        else:
            chosen = a
        chosen.value = 77
        entry, size = a, Entry.nbytes
        for _ in range(2):
            entry = Entry(entry.address + size)
            size += 0 * chosen.weight
        entry.value = chosen.value + 1

    block = np.arange(1, 7)
    run(body, block)
    assert block.tolist() == [1, 2, 3, 77, 5, 78]


def test_a_wrong_name_in_a_kernel_is_an_error_that_has_it() -> None:
    def reads(args, first, last, scratch):
        store_i64(scratch, 0, Copy(args).ohh)

    def writes(args, first, last, scratch):
        Copy(args).srk = 1

    def writes_group(args, first, last, scratch):
        a = Copy(args)
        a.of_src = a.of_dst

    def takes_two(args, first, last, scratch):
        store_i64(scratch, 0, Copy(args, 1).oh)

    with pytest.raises(KernelError, match=r"Copy has no word 'ohh'; did you mean 'oh'\?"):
        generate("reads", reads)
    with pytest.raises(KernelError, match=r"Copy has no word 'srk'; did you mean 'src'\?"):
        generate("writes", writes)
    with pytest.raises(KernelError, match=r"Copy: 'of_src' is no word that can be written"):
        generate("writes_group", writes_group)
    with pytest.raises(KernelError, match=r"Copy\(address\) takes one integer"):
        generate("takes_two", takes_two)


def test_llvm_code_reads_a_record_by_name() -> None:
    @emitted
    def difference(record: Any) -> Any:
        run = Copy.load(record)
        assert isinstance(run.of_dst, Pixels)
        assert run.src.type == ir.IntType(64)
        return build.sub(run.outer[1].step, run.of_dst.row)

    def body(args, first, last, scratch):
        a = Copy(args)
        a.src = difference(a.address)

    block = np.array(Copy(**BLOCK), np.int64)
    run(body, block)
    assert block[0] == 50 - 30


def test_two_classes_of_one_name_are_two() -> None:
    def declared(first: str, second: str) -> Any:
        return type(Entry)("Same", (Arguments,), {first: word(""), second: word("")})

    one, other = declared("a", "b"), declared("b", "a")

    def body(args, first, last, scratch):
        one(args).a = 1
        other(args).a = 2

    block = np.zeros(2, np.int64)
    run(body, block)
    assert block.tolist() == [1, 2]
