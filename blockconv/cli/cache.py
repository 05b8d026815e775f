"""`blockconv cache`: list and remove compiled kernels on disk."""

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from blockconv import jit
from blockconv.core.errors import ignoring
from blockconv.jit.kernel_cache import DAY, KEPT_DAYS, CachedFingerprint, KernelCache


def add_cache(command: argparse.ArgumentParser) -> None:
    """The command line of `cache`."""
    removal = command.add_mutually_exclusive_group()
    removal.add_argument(
        "--prune",
        nargs="?",
        type=_days,
        const=KEPT_DAYS,
        metavar="DAYS",
        help=f"remove fingerprints unused for DAYS days (default {KEPT_DAYS:.0f}), but not the current one",
    )
    removal.add_argument("--clear", action="store_true", help="remove all fingerprints, also the current one")
    command.set_defaults(run=_cache)


def _days(text: str) -> float:
    with ignoring(ValueError):
        if (days := float(text)) >= 0:
            return days
    raise argparse.ArgumentTypeError(f"{text!r} has to be a number of days, at least 0")


def _cache(options: argparse.Namespace, console: Console) -> int:
    cache = jit.cache.disk_cache()
    if options.clear:
        _say_removed(cache.clear(), console)
    elif options.prune is not None:
        _say_removed(cache.prune(options.prune), console)
    else:
        _list(cache, console)
    return 0


def _say_removed(removed: Sequence[CachedFingerprint], console: Console) -> None:
    for kept in removed:
        console.print(f"removed {kept.fingerprint}, last used {_ago(kept.age)}: {kept.entries} entries")
    size = decimal(sum(kept.nbytes for kept in removed))
    plural = "" if len(removed) == 1 else "s"
    console.print(f"{len(removed)} fingerprint{plural} removed, {size}")


def _list(cache: KernelCache, console: Console) -> None:
    found = cache.contents()
    table = Table(show_footer=True)
    table.add_column("fingerprint", "all", no_wrap=True)
    table.add_column("entries", str(sum(kept.entries for kept in found)), justify="right")
    table.add_column("size", decimal(sum(kept.nbytes for kept in found)), justify="right")
    table.add_column("last used")
    table.add_column("")
    for kept in found:
        used = "in use" if kept.fingerprint == cache.fingerprint else ""
        table.add_row(kept.fingerprint, str(kept.entries), decimal(kept.nbytes), _ago(kept.age), used)
    console.print(f"compiled kernels in {cache.base}", soft_wrap=True)
    console.print(table)
    console.print(
        "A fingerprint is one combination of versions (blockconv, Numba, LLVM, Python) and processor. "
        f"A compilation removes those that were unused for {KEPT_DAYS:.0f} days.",
    )


def _ago(seconds: float) -> str:
    """Whole days, as that is how fine uses are noted."""
    days = int(seconds / DAY)
    return "within a day" if days == 0 else f"{days} day{'s' if days > 1 else ''} ago"
