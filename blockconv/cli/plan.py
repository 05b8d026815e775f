"""`blockconv plan` chooses, explains and draws the layouts of a network. `blockconv tune` measures."""

import argparse
from pathlib import Path
from typing import get_args

import numpy as np
from rich.console import Console

from blockconv.cli.arguments import add_model, page, positive, read_model, written
from blockconv.cli.output import Steps
from blockconv.core.errors import ArgumentError
from blockconv.core.files import replacing
from blockconv.core.types import FloatType
from blockconv.dispatch import measuring, tuning
from blockconv.machine import profile
from blockconv.network.plan import compile
from blockconv.network.planning.planned import Layouts
from blockconv.runtime import get_num_threads


def add_plan(command: argparse.ArgumentParser) -> None:
    """The command line of `plan`."""
    add_model(command)
    text = "a layout for every op (default: auto); several options name layouts to choose among, or nodes: NODE=LAYOUT"
    command.add_argument("--layouts", action="append", default=[], metavar="[NODE=]LAYOUT", help=text)
    command.add_argument("--planner", choices=("optimal", "greedy"), default="optimal", help="the algorithm")
    command.add_argument("--measure", action="store_true", help="measure the candidates instead of predicting them")
    text = "the storage type of weights and of values between ops (default: float32)"
    command.add_argument("--precision", choices=get_args(FloatType), default="float32", help=text)
    command.add_argument("--costs", type=Path, metavar="JSON", help="a file with your own costs (see Plan.cost_table)")
    command.add_argument("--profile", action="store_true", help="measure every call of the plan")
    text = "write the plan as an HTML page, or as data into a .json file"
    command.add_argument("--report", type=page, metavar="FILE", help=text)
    command.add_argument("--save", type=written, metavar="FILE", help="write the plan to FILE, for blockconv.Plan.load")
    command.set_defaults(run=_plan)


def add_tune(command: argparse.ArgumentParser) -> None:
    """The command line of `tune`."""
    add_model(command, "an ONNX model, whose candidate kernels are measured too")
    used = f"{profile.VARIABLE}=FILE then uses it for costs and tiles"
    text = f"measure the profile of this machine and write it to FILE; {used}"
    command.add_argument("--profile", type=written, metavar="FILE", help=text)
    text = "the number of measured profiles; FILE gets the median of each time (default: 3)"
    command.add_argument("--runs", type=positive, default=3, help=text)
    command.set_defaults(run=_tune)


def _plan(options: argparse.Namespace, console: Console) -> int:
    layouts = _layouts(options.layouts)
    with Steps(3 if options.profile else 2) as steps:
        steps.begin(f"reading {options.model or 'ResNet-50'}")
        network = read_model("plan", options)
        steps.begin("choosing layouts, compiling kernels, packing weights")
        asked = {"costs": options.costs, "precision": options.precision}
        plan = compile(network, layouts, options.planner, options.measure, **asked)
        if options.profile:
            steps.begin("timing every call")
            rng = np.random.default_rng(0)
            plan.profile(*(rng.standard_normal(x.shape).astype(x.dtype) for x in plan.network.inputs))
    said = [plan.explain()]
    if options.report:
        plan.report(options.report)
        said.append(f"written: {options.report}")
    if options.save:
        plan.save(options.save)
        said.append(f"saved: {options.save}")
    console.print("\n".join(said), soft_wrap=True)  # after the files: a reader of a pipe may close it before the end
    return 0


def _layouts(given: list[str]) -> Layouts:
    """As `compile` takes them."""
    pairs = [(node, layout) for text in given for node, _, layout in [text.rpartition("=")]]
    nodes = dict(pairs)
    if "" not in nodes and len(nodes) == len(pairs):
        return nodes or "auto"
    if set(nodes) != {""}:
        rule = "has to be layouts, or NODE=LAYOUT with a different node each time"
        raise ArgumentError("plan", "--layouts", " ".join(given), rule)
    return nodes[""] if len(pairs) == 1 else [layout for _, layout in pairs]


def _tune(options: argparse.Namespace, console: Console) -> int:
    if options.profile is not None:
        with Steps(1) as steps:
            steps.begin("measuring this machine, which should be idle")
            known = measuring.measure(options.runs)
        with replacing("tune", options.profile) as file:
            file.write(known.to_json().encode())
        console.print(f"written: {options.profile}; {profile.VARIABLE}={options.profile} uses it for costs and tiles")
        return 0
    with Steps(1 if options.model is None else 2) as steps:
        steps.begin("measuring a convolution and a copy")
        found = tuning.calibrate()
        if options.model is not None:
            steps.begin(f"timing the kernels of {options.model}")
            compile(read_model("tune", options), measure=True)
    console.print(f"measured time / predicted time: convolutions {found.compute:.2f}, memory moves {found.memory:.2f}")
    if options.model is not None:
        console.print(f"kept the times of {len(tuning.Costs())} kernels on {get_num_threads()} threads")
    return 0
