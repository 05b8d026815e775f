"""The table of known calls, as native code reads it: its blocks, and the kernels that look a call up and run it."""

from blockconv import jit
from blockconv.jit.arguments import Arguments, word
from blockconv.jit.ir import call_kernel, fetch_add, load_acquire, load_i64, store_i64

SLOTS = 1024  # of the table, a power of two


class Root(Arguments):
    """The one block that native code finds by its symbol; zeros until Python has planned a call."""

    find = word("`find_call`", "address of a kernel")
    run = word("`run_call`", "address of a kernel")
    slots = word("the first known call of each slot, or 0", "address")
    version = word("`VERSION` of this process")
    process = word("a number that no other process has")


class KnownCall(Arguments):
    """A kind of call that is planned. Python makes it, and changes `instances` alone."""

    key = word("its words", "address")
    words = word("of the key")
    next = word("another one in the same slot, or 0", "address of a KnownCall")
    instances = word("the first instance", "address of a KnownInstance")
    n = word("images of the result")
    c = word("channels of the result")
    h = word("rows of the result")
    w = word("columns of the result")
    channels_last = word("whether the result is stored in the order of NHWC")
    copies = word("which arrays have to be copied first, so that they are dense: bit k stands for array k")


class KnownInstance(Arguments):
    """What a call that is in flight has for itself."""

    users = word("threads that take it; the first one has it")
    next = word("another instance of the same call, or 0", "address of a KnownInstance")
    launch = word("`launch_alone`", "address of a kernel")
    record = word("what it takes", "address")
    patches = word("words of the record that are addresses of arrays")
    patch = word("the first of them", "address of a Patch")


class Patch(Arguments):
    """A word that is the address of an array, plus bytes."""

    at = word("the word", "address")
    number = word("of the array among the call's")
    offset = word("what is added", "bytes")


class CallLookup(Arguments):
    """A native call: what it looks for, and what is found."""

    key = word("its words", "address")
    words = word("of the key")
    found = word("the known call, or 0", "address of a KnownCall")
    arrays = word("the address of each array, the result's last", "address")
    ran = word("whether an instance was free")
    slots = word("of `Root`", "address")
    slot = word("the key's slot")


def _hash(key, words):  # type: ignore[no-untyped-def]
    found = words
    for k in range(words):
        found = (found ^ load_i64(key, k)) * 0x2545F4914F6CDD1D
        found = found ^ (found >> 29)
    return found & (SLOTS - 1)


@jit.kernel
def find_call():  # type: ignore[no-untyped-def]
    """Look a `CallLookup` up; called with its address alone."""

    def find(args, unused_first, unused_last, unused_scratch):  # type: ignore[no-untyped-def]
        lookup = CallLookup(args)
        words = lookup.words
        lookup.slot = _hash(lookup.key, words)  # type: ignore[no-untyped-call]
        entry = load_acquire(lookup.slots + 8 * lookup.slot)
        searching = 1
        while searching:
            if entry == 0:
                searching = 0
            else:
                known = KnownCall(entry)
                equal = 1 if known.words == words else 0
                for k in range(words):
                    if equal:
                        equal = 1 if load_i64(known.key, k) == load_i64(lookup.key, k) else 0
                if equal:
                    searching = 0
                else:
                    entry = known.next
        lookup.found = entry

    return find


@jit.kernel
def run_call():  # type: ignore[no-untyped-def]
    """Run what a `CallLookup` found, if an instance is free; called with its address alone."""

    def run(args, unused_first, unused_last, unused_scratch):  # type: ignore[no-untyped-def]
        lookup = CallLookup(args)
        entry = KnownCall(lookup.found).instances
        lookup.ran = 0
        while entry != 0:
            instance = KnownInstance(entry)
            if load_acquire(entry) == 0:
                if fetch_add(entry, 1) == 0:
                    patch = Patch(instance.patch)
                    for k in range(instance.patches):
                        store_i64(patch[k].at, 0, load_i64(lookup.arrays, patch[k].number) + patch[k].offset)
                    call_kernel(instance.launch, instance.record, 0, 0, 0)
                    lookup.ran = 1
                fetch_add(entry, -1)
            entry = 0 if lookup.ran else instance.next

    return run
