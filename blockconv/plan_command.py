"""`blockconv plan`, which chooses, explains and draws the layouts of a network; `blockconv tune`, which measures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from blockconv import tuning
from blockconv.errors import ArgumentError
from blockconv.frontends.onnx import load_onnx
from blockconv.network.graph import Network
from blockconv.network.plan import Plan, compile
from blockconv.network.resnet import resnet50
from blockconv.runtime import get_num_threads

__all__ = ["add_plan", "add_tune"]


def add_plan(command: argparse.ArgumentParser) -> None:
    """The command line of `plan`."""
    command.add_argument("model", nargs="?", type=Path, help="an ONNX model (default: ResNet-50 with random weights)")
    command.add_argument("--layouts", default="auto", help="a layout for every op, or auto (the default)")
    command.add_argument("--planner", choices=("optimal", "greedy"), default="optimal")
    command.add_argument("--measure", action="store_true", help="time the candidates instead of predicting them")
    command.add_argument("--costs", type=Path, metavar="JSON", help="costs of your own")
    command.add_argument("--shape", help="the input's sizes, such as 1x3x224x224")
    command.add_argument("--profile", action="store_true", help="time every call of the plan")
    command.add_argument("--report", type=Path, metavar="HTML", help="write the plan as a page")
    command.add_argument("--save", type=Path, metavar="FILE", help="write the plan, to be read by bc.Plan.load")
    command.set_defaults(run=_plan)


def add_tune(command: argparse.ArgumentParser) -> None:
    """The command line of `tune`."""
    command.add_argument("model", nargs="?", type=Path, help="an ONNX model, all of whose candidates are timed too")
    command.add_argument("--shape", help="the input's sizes, such as 1x3x224x224")
    command.set_defaults(run=_tune)


def _network(model: Path | None, shape: str | None) -> Network:
    network = resnet50() if model is None else load_onnx(model)
    if shape is None:
        return network
    try:
        sizes = tuple(int(size) for size in shape.split("x"))
    except ValueError:
        raise ArgumentError("plan", "--shape", shape, "has to be whole numbers with x between") from None
    return network.with_input_shapes(sizes)


def _plan(options: argparse.Namespace, console: Console) -> int:
    network = _network(options.model, options.shape)
    with console.status("compiling kernels"):
        plan = compile(network, options.layouts, options.planner, options.measure, costs=options.costs)
    if options.profile:
        with console.status("timing"):
            plan.profile(*_noise(plan))
    console.print(plan.explain(), highlight=False, markup=False, soft_wrap=True)
    if options.report:
        plan.report(options.report)
        console.print(f"drawn: {options.report}", highlight=False, markup=False)
    if options.save:
        plan.save(options.save)
        console.print(f"saved: {options.save}", highlight=False, markup=False)
    return 0


def _noise(plan: Plan) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(tensor.shape).astype(tensor.dtype) for tensor in plan.network.inputs]


def _tune(options: argparse.Namespace, console: Console) -> int:
    with console.status("measuring a convolution and a copy"):
        found = tuning.calibrate()
    console.print(
        f"times over those that rows predict: convolutions {found.compute:.2f}, what moves memory {found.memory:.2f}; "
        "kept with the compiled kernels",
        highlight=False,
    )
    if options.model is not None:
        compile(_network(options.model, options.shape), measure=True)
        console.print(f"{len(tuning.Costs())} kernels timed on {get_num_threads()} threads, kept", highlight=False)
    return 0
