"""`blockconv run`: run a network on a picture, in fixed layouts and in the chosen plan, and compare."""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from blockconv.cli.arguments import add_model, page, positive, read_model
from blockconv.cli.output import Steps
from blockconv.core import text
from blockconv.core.errors import ArgumentError, needing
from blockconv.core.files import packaged
from blockconv.core.layout import read_layout
from blockconv.core.python import zipped
from blockconv.core.types import Array
from blockconv.network.graph import Network
from blockconv.network.ops.rule import Tensor
from blockconv.network.plan import Plan, compile
from blockconv.runtime import get_num_threads

# A round calls every plan once, so that whatever disturbs the machine hits all of them.
ROUNDS, LEAST = 15, 5  # at most, and at least
BUDGET = 3.0  # seconds that rounds go on for at most, once there are LEAST
TOLERANCE = 1e-4  # of the largest output; Winograd costs up to 1e-5 a layer
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pictures, which most models expect
LAYOUTS = "NCHW", "NHWC", "NCHW8", "NCHW16"  # others compile a third more kernels


class Contestant(NamedTuple):
    """A plan, the seconds that it took to compile and call once, and its first output."""

    name: str
    plan: Plan
    ready: float
    output: Array


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command line of `run`."""
    add_model(command)
    command.add_argument("--input", metavar="IMAGE|random", help="your own picture (needs pillow), or noise")
    command.add_argument("--batch", type=positive, help="the number of pictures in a call (default: the model's, or 1)")
    command.add_argument("--layouts", nargs="+", default=LAYOUTS, metavar="LAYOUT", help="the fixed layouts to compare")
    command.add_argument("--report", type=page, metavar="FILE", help="write the chosen plan, as `blockconv plan` does")


def run(options: argparse.Namespace, console: Console) -> int:
    """Compile the plans, call them in turns, and compare; 1 if their outputs differ by more than TOLERANCE."""
    names = [*dict.fromkeys(read_layout("run", "--layouts", name).name for name in options.layouts), "auto"]
    with Steps(len(names) + 2) as steps:
        steps.begin(f"reading {options.model or 'ResNet-50'}")
        network = _network(options)
        inputs = [_entering(tensor, options.input) for tensor in network.inputs]
        found = _compiled(network, names, inputs, steps)
        steps.begin(f"timing {len(found)} plans in turns")
        times = list(map(statistics.median, _timed(found, inputs)))
    wanted = found[0].output
    largest = float(np.abs(wanted).max(initial=0)) or 1.0
    errors = [float(np.abs(c.output - wanted).max(initial=0)) / largest for c in found]
    console.print(_table(network, found, times, errors))
    console.print(
        f"Medians of {LEAST} to {ROUNDS} calls in turns on {text.threads(get_num_threads())}. Ready: time to plan, "
        "compile and pack (without the work of a plan above or an earlier run), and to call once.",
    )
    if options.report:
        plan = found[-1].plan
        plan.profile(*inputs)
        plan.report(options.report, {c.name: seconds for c, seconds in zipped(found, times)})
        console.print(f"the chosen plan: {options.report}")
    return 0 if max(errors) <= TOLERANCE else 1


def _network(options: argparse.Namespace) -> Network:
    network, batch = read_model("run", options), options.batch
    if batch is None or all(tensor.shape[:1] == (batch,) for tensor in network.inputs):
        return network
    return network.with_input_shapes({t.name: (batch, *t.shape[1:]) for t in network.inputs})


def _entering(tensor: Tensor, asked: str | None) -> Array:
    """The input of a network: a picture if it takes one, else noise."""
    rest = tensor.shape[1:]
    if asked == "random" or len(rest) != 3 or rest[0] != 3:
        if asked not in (None, "random"):
            rule = f"has to be 'random', because the input {tensor.name} {tensor.shape} takes no picture"
            raise ArgumentError("run", "--input", asked, rule)
        return np.random.default_rng(0).standard_normal(tensor.shape).astype(tensor.dtype)
    pixels = bundled() if asked is None else read(Path(asked))
    rows, cols = (np.arange(size) * there // size for size, there in zipped(rest[1:], pixels.shape[:2]))
    picture = (pixels[rows][:, cols] / np.float32(255) - MEAN) / SPREAD
    return np.repeat(picture.transpose(2, 0, 1)[None], tensor.shape[0], axis=0).astype(tensor.dtype)


def bundled() -> npt.NDArray[np.uint8]:
    """The picture that comes with the library, [row][column][red, green, blue]."""
    with packaged("picture.npz").open("rb") as stream, np.load(stream) as arrays:
        pixels: npt.NDArray[np.uint8] = arrays["rgb"]
    return pixels


def read(path: Path) -> npt.NDArray[np.uint8]:
    """A picture from a file."""
    with needing("run: --input", "PIL", "pillow"):
        from PIL import Image
    try:
        with Image.open(path) as picture:
            return np.asarray(picture.convert("RGB"), np.uint8)
    except OSError as error:
        raise ArgumentError("run", "--input", str(path), f"is no picture that pillow reads ({error})") from None


def _compiled(network: Network, names: Sequence[str], inputs: list[Array], steps: Steps) -> list[Contestant]:
    found: list[Contestant] = []
    for name in names:
        steps.begin(f"planning {_titled(name)}, compiling its kernels, packing its weights")
        start = time.perf_counter()
        plan = found[0].plan.with_layouts(name) if found else compile(network, layouts=name)
        first = plan(*inputs)
        output = first if isinstance(first, np.ndarray) else next(iter(first.values()))
        found.append(Contestant(name, plan, time.perf_counter() - start, np.asarray(output, np.float64)))
    return found


def _timed(found: list[Contestant], inputs: list[Array]) -> list[list[float]]:
    """Seconds of each plan's calls: of as many rounds as there is time for."""
    times: list[list[float]] = [[] for _ in found]
    begun = time.perf_counter()
    while len(times[0]) < LEAST or (len(times[0]) < ROUNDS and time.perf_counter() - begun < BUDGET):
        for contestant, taken in zipped(found, times):
            start = time.perf_counter()
            contestant.plan(*inputs)
            taken.append(time.perf_counter() - start)
    return times


def _titled(name: str) -> str:
    return "the chosen plan" if name == "auto" else name


def _table(network: Network, found: list[Contestant], times: list[float], errors: list[float]) -> Table:
    shapes = ", ".join(text.dims(tensor.shape) for tensor in network.inputs)
    table = Table(title=f"{network.name}, {shapes}")
    table.add_column("layout")
    for heading in ("ms", "times the fastest", "reorders", "ready, s", "difference"):
        table.add_column(heading, justify="right")
    best = min(times)
    for c, seconds, error in zipped(found, times, errors):
        shares = f"{seconds * 1e3:.2f}", f"{seconds / best:.2f}"
        rest = str(len(c.plan.reorders)), f"{c.ready:.2f}", f"{error:.1e}"
        table.add_row(_titled(c.name), *shares, *rest, style="bold green" if seconds == best else None)
    return table
