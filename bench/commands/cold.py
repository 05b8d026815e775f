"""`python -m bench cold`: what a process costs before its first answer, in CPU seconds, each in a process of its own.

A network is loaded from an ONNX file, compiled and called once: with an empty cache, with its kernels on disk, and with
an empty cache and a pack (`blockconv pack`) of its kernels. Then it is called at `--sizes` random sizes of images: how
many kernels these compile, and what a first call costs beyond a second one. The last line makes `--calls` random calls
of `conv2d`.

The aims: 3 s with an empty cache, of at most 15 kernels; 0.6 s with a pack; 8 kernels more for 40 sizes, and 60 ms more
than the second call for nine of ten; 20 kernels for 60 calls; 0.3 s to import.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnx
from rich.console import Console
from rich.table import Table

from .. import networks

__all__ = ["add_arguments", "run"]

# Python that a process runs; `told` is what it prints, as JSON.
BEGIN = """
import json, sys, time
given = json.loads(sys.argv[1])
shape = tuple(given.get("shape", ()))
import blockconv as bc
told = {"import": time.process_time()}
import numpy as np
from blockconv import jit
rng = np.random.default_rng(given["seed"])
def compiled():
    import gc
    families = [each for each in gc.get_objects() if type(each) is jit.KernelFamily]
    return sum(kernel.compiled for family in families for kernel in family._kernels.values())
"""
NETWORK = """
plan = bc.compile(bc.load_onnx(given["model"], input_shapes=shape), threads=1)
plan(np.zeros(shape, np.float32))
told["ready"], told["compiled"] = time.process_time(), compiled()
beyond = []
for size in range(given["sizes"]):
    x = np.zeros((*shape[:2], *map(int, rng.integers(97, 401, 2))), np.float32)
    begun = time.process_time()
    plan(x)
    between = time.process_time()
    plan(x)
    beyond.append(2 * between - begun - time.process_time())
told["more"], told["beyond"] = compiled() - told["compiled"], sorted(beyond)
"""
CALLS = """
for _ in range(given["calls"]):
    k, c, kind = int(rng.choice([1, 3, 5])), 2 ** int(rng.integers(3, 8)), int(rng.integers(3))
    stride, side, groups = int(rng.integers(1, 3)), int(rng.integers(7, 120)), c if kind == 0 else 1
    w = np.ones((2 ** int(rng.integers(3, 8)) if kind else c, c // groups, k, k), np.float32)
    bc.conv2d(np.ones((1, c, side, side), np.float32), w, stride=stride, padding=k // 2, groups=groups)
told["ready"], told["compiled"] = time.process_time(), compiled()
"""
END = "print(json.dumps(told))"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    names = ["resnet50", "mobilenetv2", "mobilenetv3", "efficientnet_b0"]  # ShuffleNet's file holds sizes of images
    command.add_argument("--networks", nargs="*", choices=list(networks.NETWORKS), default=names)
    command.add_argument("--sizes", type=int, default=40, help="other sizes of images that each network is called with")
    command.add_argument("--calls", type=int, default=60, help="random calls of conv2d")
    command.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    table = Table("network", "import, s", "empty cache:\ns", "kernels", "on disk:\ns", "kernels", "pack:\ns", "kernels",
                  "other sizes:\nkernels", "first call, ms:\nmedian", "90 %")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        # An installed package has its bytecode, so processes keep theirs; `blockconv pack` runs first, and makes most.
        os.environ.update(PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=f"{folder}/bytecode")
        for name in options.networks:
            table.add_row(name, *_network(name, Path(folder) / name, options))
        if options.calls:
            told = _process(CALLS, Path(folder) / "calls", seed=options.seed, calls=options.calls)
            name = f"{options.calls} calls of conv2d"
            table.add_row(name, f"{told['import']:.2f}", f"{told['ready']:.1f}", str(told["compiled"]))
    console.print(table)
    return 0


def _network(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    folder.mkdir()
    model, pack, of_any_size = folder / "model.onnx", folder / "model.pack", folder / "sizes.onnx"
    onnx.save(networks.build(name), model)
    onnx.save(networks.any_size(name), of_any_size)
    given = {"model": str(model), "shape": (1, 3, 224, 224), "seed": options.seed, "sizes": 0}
    made = [sys.executable, "-m", "blockconv", "pack", str(model), "--output", str(pack)]
    subprocess.run(made, check=True, capture_output=True)
    cold = _process(NETWORK, folder / "cache", **given)
    warm = _process(NETWORK, folder / "cache", **given)
    packed = _process(NETWORK, folder / "unused", {"BLOCKCONV_PACKS": str(pack)}, **given)
    sizes = _process(NETWORK, folder / "cache", **given | {"model": str(of_any_size), "sizes": options.sizes})
    beyond = [1e3 * seconds for seconds in sizes["beyond"]] or [0.0]
    return [
        f"{cold['import']:.2f}",
        *(text for told in (cold, warm, packed) for text in (f"{told['ready']:.2f}", str(told["compiled"]))),
        *(str(sizes["more"]), f"{beyond[len(beyond) // 2]:.0f}", f"{beyond[len(beyond) * 9 // 10]:.0f}"),
    ]


def _process(code: str, cache: Path, variables: dict[str, str] | None = None, **given: Any) -> dict[str, Any]:
    """Run code in a process that keeps its kernels in a folder, and return what the code prints."""
    command = [sys.executable, "-c", BEGIN + code + END, json.dumps(given)]
    # One processor: other processes would help to compile, and their CPU time would not count.
    one = {"NUMBA_NUM_THREADS": "1", "BLOCKCONV_CACHE_DIR": str(cache), **(variables or {})}
    prefix = ["taskset", "-c", "0"] if sys.platform == "linux" else []
    done = subprocess.run([*prefix, *command], env={**os.environ, **one}, check=True, stdout=subprocess.PIPE, text=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told
