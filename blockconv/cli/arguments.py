"""The common part of the commands: a parser, and the arguments of a network: a model and its input shapes."""

import argparse
import os
from pathlib import Path
from typing import Any

from blockconv.core.checks import Shape
from blockconv.core.errors import ArgumentError
from blockconv.frontends.onnx import load_onnx
from blockconv.network.graph import Network
from blockconv.network.plan import SUFFIXES
from blockconv.network.resnet import resnet50


class Parser(argparse.ArgumentParser):
    """A parser, with those of its commands, that takes options in full only: `--shape` is not short for `--shapes`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})


def positive(text: str) -> int:
    """An argument that is a whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has to be a whole number of at least 1")
    return int(text)


def written(text: str) -> Path:
    """An argument that is a file to write. It is checked before long work begins."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        rule = "is a folder" if path.is_dir() else "cannot be written" if path.parent.exists() else "has no folder"
        raise argparse.ArgumentTypeError(f"{text} {rule}")
    return path


def page(text: str) -> Path:
    """An argument that is a file for `Plan.report`."""
    path = written(text)
    if path.suffix.lower() not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text} has to end in {' or '.join(SUFFIXES)}")
    return path


def add_model(
    command: argparse.ArgumentParser, model: str = "an ONNX model (default: ResNet-50 with random weights)"
) -> None:
    """Add the arguments of a model and its shapes to a command. model: the help text of the first."""
    command.add_argument("model", nargs="?", type=Path, help=model)
    text = "the shape of the input, such as 1x3x224x224; for several inputs one option each, with a name: x=1x3x8x8"
    command.add_argument("--shape", action="append", default=[], metavar="[INPUT=]SIZES", help=text)
    text = "refuse ops that blockconv has no kernels for; else ONNX Runtime runs them"
    command.add_argument("--strict", action="store_true", help=text)
    command.add_argument("--threads", type=positive, help="the most threads of a call (see `blockconv doctor`)")


def read_model(command: str, options: argparse.Namespace) -> Network:
    """The requested network. Raises ArgumentError, which names the command, for shapes that it does not take."""
    shapes = _shapes(command, options.shape)
    try:
        if options.model is not None:
            return load_onnx(options.model, shapes, strict=options.strict)
        network = resnet50()
        return network if shapes is None else network.with_input_shapes(shapes)
    except ArgumentError as error:
        if error.argument not in ("input_shapes", "shapes"):
            raise
        remedy = "give for example --shape 1x3x224x224, or --shape INPUT=SIZES for each input"
        raise ArgumentError(command, "--shape", " ".join(options.shape) or None, error.rule, remedy) from error


def _shapes(command: str, given: list[str]) -> dict[str, Shape] | Shape | None:
    """By input, or one shape for the only input; None if there is none."""
    pairs = [(name, _sizes(command, text, sizes)) for text in given for name, _, sizes in [text.rpartition("=")]]
    if not pairs:
        return None
    if len(pairs) == 1 and not pairs[0][0]:
        return pairs[0][1]
    shapes = dict(pairs)
    if "" in shapes or len(shapes) < len(pairs):
        rule = "has to name an input, a different one each time"
        remedy = "give for example --shape x=1x3x8x8 --shape y=1x3x8x8"
        raise ArgumentError(command, "--shape", " ".join(given), rule, remedy)
    return shapes


def _sizes(command: str, text: str, sizes: str) -> Shape:
    try:
        return tuple(int(size) for size in sizes.split("x"))
    except ValueError:
        raise ArgumentError(command, "--shape", text, "has to be whole numbers, separated by x") from None
