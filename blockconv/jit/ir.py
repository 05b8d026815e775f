"""LLVM IR building blocks for kernels: code that is emitted where a kernel calls it.

Kernels see memory as int64 addresses: no arrays, no reference counts, nothing that could
allocate, raise or need the GIL. Parameters of type int are known while a kernel is built.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir

from blockconv.core.python import zipped
from blockconv.core.target import is_arm64, is_x86
from blockconv.jit.values import Emitted, binary, build, floating

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def const(value: int) -> ir.Constant:
    return I64(value)


def pointer(address, to):
    """`address` (i64) as a pointer to the LLVM type `to`."""
    return build.inttoptr(address, to.as_pointer())


def call_llvm(name: str, result, args: list[Any]):
    """Call an LLVM intrinsic or C function by name. (`declare_intrinsic` knows no vector types.) result: or None."""
    signature = ir.FunctionType(result or ir.VoidType(), [a.type for a in args])
    function = build.module.globals.get(name) or ir.Function(build.module, signature, name)
    return build.call(function, args)


def opaque(value):
    """The same i64 or vector, as a value that the optimiser knows nothing about.

    LLVM hoists multiples of a loop-invariant stride out of the loop, and spills them if they are many: a load for each
    load. Multiples of an opaque stride stay sums, computed where they are used.

    A shuffle that reads only some 16 bytes of a bitwise operation's result sends LLVM's instruction selection into an
    endless loop: LLVM 22, with AVX-512 and the tuning for Intel. With an opaque vector there is no such loop.
    """
    register = "r" if value.type == I64 else "v" if is_x86() else None
    if register is None:
        return value
    kind = ir.FunctionType(value.type, [value.type])
    return build.call(ir.InlineAsm(kind, "", f"={register},0", False), [value])


# ---------------------------------------------------------------- code of our own


def emitted(emit: Callable[..., Any], whole: bool = False):
    """Decorator of ``emit(*arguments)``, which emits LLVM IR where a kernel calls it, and gives a value.

    The arguments are values of LLVM, or NamedTuples of them; a view of a block is its address, and a held one a block
    of values. A value that is known while a kernel is built (a tile's shape, an element type) is given as it is to a
    parameter of another type than Any. For one of type int it has to be known. whole: all arguments are as a kernel has
    them.
    """
    return Emitted(emit, whole)


@functools.partial(emitted, whole=True)
def digits(number, *sizes) -> tuple[Any, ...]:
    """A number's digits, which are below these sizes, the lowest digit first, and what is above them."""
    found = []
    for size in sizes:
        found.append(binary("mod", number, size))
        number = binary("floordiv", number, size)
    return (*found, number)


@contextlib.contextmanager
def counted(stop, start=None, step=None) -> Iterator[Any]:
    """A loop whose index goes from `start` (0) up to `stop`, which it does not reach, by `step` (1). Yields the index.

    The body is what is emitted within `with`.
    """
    condition, body, end = (build.append_basic_block(f"for.{name}") for name in ("cond", "body", "end"))
    before = build.block
    build.branch(condition)
    build.position_at_end(condition)
    index = build.phi(stop.type)
    build.cbranch(build.icmp_signed("<", index, stop), body, end)
    build.position_at_end(body)
    yield index
    index.add_incoming(stop.type(0) if start is None else start, before)
    following = build.add(index, stop.type(1), flags=("nsw",)) if step is None else build.add(index, step)
    index.add_incoming(following, build.block)
    build.branch(condition)
    build.position_at_end(end)


def apart(body: Callable[..., None]):
    """Decorator of a kernel's rare code, a function of int64s: machine code calls it, and it reloads what it needs.

    Inlined, it would take registers from the loop around it.
    """

    def emit_call(*given) -> None:
        from blockconv.jit.translate import call  # and Numba, see `compiler.lower`

        kind = ir.FunctionType(ir.VoidType(), [I64] * len(given))
        function = ir.Function(build.module, kind, build.module.get_unique_name(body.__name__))
        function.linkage, function.attributes.alignstack = "internal", 64
        function.attributes.update(("noinline", "nounwind"))
        with build.goto_block(function.append_basic_block()):
            call(body, tuple(function.args), {})
            build.ret_void()
        build.call(function, given)

    return Emitted(emit_call)


# ---------------------------------------------------------------- scalars


@emitted
def load_i64(address, index):
    """The int64 at ``address + 8 * index``."""
    return build.load(build.gep(pointer(address, I64), [index]), align=8)


@emitted
def store_i64(address, index, value) -> None:
    """Write the int64 at ``address + 8 * index``."""
    build.store(value, build.gep(pointer(address, I64), [index]), align=8)


@emitted
def load_bits(address, nbytes: int):
    """The `nbytes` bytes at `address`, zero-extended to an int64."""
    kind = ir.IntType(8 * nbytes)
    value = build.load(pointer(address, kind), align=1)
    return value if kind == I64 else build.zext(value, I64)


@emitted
def store_bits(address, value, nbytes: int) -> None:
    """Write the low `nbytes` bytes of `value` at `address`."""
    kind = ir.IntType(8 * nbytes)
    build.store(value if kind == I64 else build.trunc(value, kind), pointer(address, kind), align=1)


def _float_of(nbytes: int):
    return ir.FloatType() if nbytes == 4 else ir.DoubleType()


@emitted
def load_f(address, nbytes: int):
    """The float of `nbytes` (4 or 8) bytes at `address`, as a float of that size."""
    return build.load(pointer(address, _float_of(nbytes)), align=4)


@emitted
def store_f(address, value, nbytes: int) -> None:
    """Write `value` as a float of `nbytes` (4 or 8) bytes."""
    value = floating(value, _float_of(nbytes))
    build.store(value, pointer(address, value.type), align=4)


@emitted
def as_float64(bits):
    """The float64 of these bits: how an argument block holds one."""
    return build.bitcast(bits, ir.DoubleType())


# ---------------------------------------------------------------- threads


@emitted
def fetch_add(address, value):
    """Atomically add to the int64 at `address`; the old value (acquire-release)."""
    return build.atomic_rmw("add", pointer(address, I64), value, "acq_rel")


@emitted
def load_acquire(address):
    """The int64 at `address`, and all that was released before it was written."""
    return build.load_atomic(pointer(address, I64), "acquire", 8)


NEXT, NEAREST = 2, 3  # the second-level cache and the first-level one, as LLVM's `prefetch` has them


def emit_prefetch(address, cache: int = NEXT) -> None:
    """Prefetch a line that will be read."""
    at = pointer(address, I8)
    hints = [I32(k) for k in (0, cache, 1)]  # to read, the cache, data
    call_llvm("llvm.prefetch.p0", None, [at, *hints])


@emitted
def prefetch(address) -> None:
    """Prefetch a line that will be read into the second-level cache."""
    emit_prefetch(address)


@emitted
def spin_pause() -> None:
    """The processor's hint for a spinning loop."""
    if is_x86():
        call_llvm("llvm.x86.sse2.pause", None, [])
    elif is_arm64():
        call_llvm("llvm.aarch64.hint", None, [I32(1)])


@emitted
def yield_processor() -> None:
    """Let the operating system run another thread."""
    call_llvm("SwitchToThread" if sys.platform == "win32" else "sched_yield", I32, [])


@emitted
def call_kernel(address, args, first, last, scratch) -> None:
    """Call the kernel at `address`."""
    function = ir.FunctionType(ir.VoidType(), [I64] * 4)
    build.call(build.inttoptr(address, function.as_pointer()), [args, first, last, scratch])


# ---------------------------------------------------------------- vectors of integers (bits are moved, never rounded)


def vector(itemsize: int, lanes: int):
    return ir.VectorType(ir.IntType(8 * itemsize), lanes)


@functools.cache
def constants(bits: int, values: tuple[int, ...]):
    """A vector of known integers of so many bits: one object, as llvmlite takes long to write each as text."""
    return ir.VectorType(ir.IntType(bits), len(values))(values)


def shuffle(a, b, lanes: Sequence[int]):
    return build.shuffle_vector(a, b, constants(32, tuple(lanes)))


def picked(kind, elements: Sequence[int], part: Callable[[int], Any]):
    """A vector of some elements, in ascending order, of vectors that follow one another. Other lanes hold anything.

    part(k): vector number `k` of these, for each that has one of the elements.
    """
    value, lanes = kind(ir.Undefined), kind.count
    for k in sorted({at // lanes for at in elements}):
        taken = [lanes + at % lanes if at // lanes == k else lane for lane, at in enumerate(elements)]
        value = shuffle(value, part(k), [*taken, *range(len(taken), lanes)])
    return value


def every_pixel(lanes: int, inner: int, stride: int, first: int = 0) -> list[int]:
    """The elements of as many pixels of `inner` elements as `lanes` hold, every `stride`-th from number `first` on."""
    return [(k // inner * stride + first) * inner + k % inner for k in range(lanes // inner * inner)]


def splat(value, lanes: int):
    kind = ir.VectorType(value.type, lanes)
    one = build.insert_element(kind(ir.Undefined), value, I32(0))
    return shuffle(one, one, [0] * lanes)


def store_vector(value, address, streaming: bool = False) -> None:
    """Store; `streaming` needs an address that is a multiple of the vector, and passes the caches by."""
    align = value.type.count * value.type.element.width // 8 if streaming else 1
    store = build.store(value, pointer(address, value.type), align=align)
    if streaming:
        store.set_metadata("nontemporal", build.module.add_metadata([I32(1)]))


def join(pieces: list[Any]):
    """One vector of the lanes of all `pieces` (a power of two of them) in order."""
    while len(pieces) > 1:
        lanes = list(range(2 * pieces[0].type.count))
        pieces = [shuffle(a, b, lanes) for a, b in zipped(pieces[::2], pieces[1::2])]
    return pieces[0]


def transpose(vectors: list[Any], rows: int, columns: int) -> list[Any]:
    """The rows x columns matrix that `vectors` hold in row-major order, transposed, held in the same way.

    A perfect shuffle (zip the first half with the second) rotates the bits of an element's position by one to the left.
    So log2(rows) zips transpose, as do log2(columns) unzips.
    """
    half, lanes = len(vectors) // 2, vectors[0].type.count
    if rows <= columns:
        low = [k // 2 + lanes * (k % 2) for k in range(lanes)]
        high = [k + lanes // 2 for k in low]
        for _ in range(rows.bit_length() - 1):
            pairs = list(zipped(vectors[:half], vectors[half:]))
            vectors = [shuffle(a, b, mask) for a, b in pairs for mask in (low, high)]
    else:
        even, odd = ([*range(first, 2 * lanes, 2)] for first in (0, 1))
        for _ in range(columns.bit_length() - 1):
            pairs = list(zipped(vectors[::2], vectors[1::2]))
            vectors = [shuffle(a, b, mask) for mask in (even, odd) for a, b in pairs]
    return vectors


@emitted
def stack_memory(nbytes: int):
    """The address of so many bytes of the stack, aligned to a cache line. They hold nothing yet."""
    with build.goto_entry_block():
        slot = build.alloca(ir.ArrayType(I8, nbytes))
        slot.align = 64
    return build.ptrtoint(slot, I64)


@emitted
def copy_memory(dst, src, size) -> None:
    """Copy `size` bytes that do not overlap: C's memcpy."""
    to, at = (pointer(address, I8) for address in (dst, src))
    call_llvm("llvm.memcpy.p0.p0.i64", None, [to, at, size, ir.IntType(1)(0)])


@emitted
def fill_memory(dst, size, fill) -> None:
    """Set `size` bytes to the low byte of `fill`: C's memset."""
    to, byte = pointer(dst, I8), build.trunc(fill, I8)
    call_llvm("llvm.memset.p0.i64", None, [to, byte, size, ir.IntType(1)(0)])


@emitted
def move(dst, src, nbytes: int, stream: int) -> None:
    """Copy `nbytes` (a power of two up to 64) bytes."""
    value = build.load(pointer(src, vector(1, nbytes)), align=1)
    store_vector(value, dst, bool(stream))


@emitted
def store_repeated(dst, value, nbytes: int) -> None:
    """Write `nbytes` bytes: the low byte of `value`, repeated."""
    store_vector(splat(build.trunc(value, I8), nbytes), dst)


@emitted
def move_part(dst, src, lanes: int, itemsize: int, count) -> None:
    """Copy `count` of so many elements of 4 or 8 bytes, and zeros in place of the others, which are not read."""
    kind, iota = vector(itemsize, lanes), constants(32, tuple(range(lanes)))
    exists = build.icmp_signed("<", iota, splat(build.trunc(count, I32), lanes))
    given = [pointer(src, kind), I32(itemsize), exists, kind(None)]
    value = call_llvm(f"llvm.masked.load.v{lanes}i{8 * itemsize}.p0", kind, given)
    store_vector(value, dst)
