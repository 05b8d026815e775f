"""`blockconv pack`: compile the kernels of networks for stated processors into one file, which other machines read."""

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal

from blockconv import jit
from blockconv.cli.arguments import positive, read_model, written
from blockconv.cli.output import Steps
from blockconv.core import target
from blockconv.core.errors import ArgumentError
from blockconv.core.layout import read_layout
from blockconv.jit import packs
from blockconv.jit.compile_processes import workers
from blockconv.machine.profile import VARIABLE, committed, selected
from blockconv.network.plan import compile
from blockconv.runtime.fingerprint import compare_lines
from blockconv.runtime.launcher import launch_alone, launch_worker

NATIVE = "native"
CHUNK = 8  # kernels that a process compiles at a time


def add_pack(command: argparse.ArgumentParser) -> None:
    """The command line of `pack`."""
    command.add_argument("models", nargs="*", type=Path, help="ONNX models (default: ResNet-50)")
    command.add_argument("--output", type=written, required=True, metavar="FILE", help="the pack, which is added to")
    names = ", ".join((NATIVE, *packs.TARGETS))
    text = f"the processors to compile for (default: {NATIVE}, this one), of {names}"
    command.add_argument("--target", nargs="+", default=[NATIVE], metavar="NAME", help=text)
    text = "plan with each of these layouts (default: auto)"
    command.add_argument("--layouts", nargs="+", default=["auto"], metavar="LAYOUT", help=text)
    text = "plan for square images of these sides too"
    command.add_argument("--sides", nargs="+", type=positive, default=[], metavar="PIXELS", help=text)
    command.set_defaults(run=_pack)


def _pack(options: argparse.Namespace, console: Console) -> int:
    if options.output.suffix != packs.SUFFIX:
        raise ArgumentError("pack", "--output", str(options.output), f"has to end in {packs.SUFFIX}")
    unknown = [name for name in options.target if name != NATIVE and name not in packs.TARGETS]
    if unknown:
        raise ArgumentError("pack", "--target", unknown[0], f"has to be {NATIVE} or one of {', '.join(packs.TARGETS)}")
    layouts = [name if name == "auto" else read_layout("pack", "--layouts", name).name for name in options.layouts]
    models = options.models or [None]
    made = packs.contents(options.output)
    with Steps(2 * len(options.target)) as steps:
        for name in dict.fromkeys(options.target):
            with workers(packs.TARGETS.get(name)) as pool:
                steps.begin(f"{name}: listing the kernels of {len(models)} networks")
                lists = [pool.submit(kernels_of, path, name == NATIVE, layouts, options.sides) for path in models]
                listed = [found.result() for found in lists]
                wanted = list(dict.fromkeys(kernel for kernels, _ in listed for kernel in kernels))
                steps.begin(f"{name}: compiling {len(wanted)} kernels")
                parts = [pool.submit(compiled, wanted[k : k + CHUNK]) for k in range(0, len(wanted), CHUNK)]
                entries = {name: data for _, tables in listed for name, data in tables.items()}
                for part in parts:
                    entries |= part.result()
                record = pool.submit(packs.record, jit.cache.source_digest()).result()
                before, kept = made.get(name, (None, {}))
                made[name] = record, {**(kept if before == record else {}), **entries}
    packs.write(options.output, made)
    for name, (_, entries) in made.items():
        console.print(f"{name}: {len(entries)} kernels and choices, {decimal(sum(map(len, entries.values())))}")
    console.print(f"{options.output}: {decimal(options.output.stat().st_size)}", soft_wrap=True)
    return 0


def kernels_of(
    path: Path | None, is_native: bool, layouts: Sequence[str] = ("auto",), sides: Sequence[int] = ()
) -> tuple[list[jit.Wanted], dict[str, bytes]]:
    """The kernels of a network in layouts and sizes, and the choices that its plans keep on disk.

    They are chosen by this machine's profile, or by each of this instruction set. For `workers`.
    """
    isa = target.isa()
    profiles = [known.name for known in committed() if (known.isa, known.halves) == (isa.name, isa.halves)]
    if is_native or not profiles:
        profiles = [os.environ.get(VARIABLE, "") if is_native else selected().profile.name]
    network = read_model("pack", argparse.Namespace(model=path, shape=[], strict=False))
    for family, *params in ((launch_alone,), (launch_worker, 0), (launch_worker, 3), (compare_lines,)):
        family(*params)  # on every pool of threads
    for side in (None, *sides):
        sized = network
        if side is not None:
            shapes = {t.name: (*t.shape[:2], side, side) if len(t.shape) == 4 else t.shape for t in network.inputs}
            sized = network.with_input_shapes(shapes)
        for profile in profiles:
            os.environ[VARIABLE] = profile
            plan = compile(sized, layouts=layouts[0])
            for name in layouts[1:]:
                plan.with_layouts(name)
    kept = jit.disk_cache()
    tables = {path.name: kept.read(path.name) or b"" for path in kept.directory.glob("*-*")}
    return list(jit.families.requested), tables


def compiled(wanted: Sequence[jit.Wanted]) -> dict[str, bytes]:
    """Object code by entry. For `workers`."""
    found = {}
    for module, name, params in wanted:
        family = getattr(importlib.import_module(module), name)
        found[family.entry(*params)] = packs.checked(family.name(*params), family.generate(*params).object)
    return found
