"""`python -m bench graphs FOLDER`: the networks of a collection, tried one by one.

FOLDER has samples as GraphNet has them (github.com/PaddlePaddle/GraphNet, `samples/`): a folder each with `model.py`, a
`GraphModule` of PyTorch, `weight_meta.py`, and `input_tensor_constraints.py`. Weights are random, with the statistics
that the sample gives. Each sample runs in a process of its own, by one of the WAYS:

onnx: exported to ONNX, then `load_onnx` and `compile`. from_torch: `from_torch` and `compile`.
compile: `torch.compile(backend="blockconv")`. Inductor with freezing is beside it if asked for.

A result says whether the sample loads and runs, and how far outputs and ONNX Runtime's are from PyTorch's. It has the
number of ops that are foreign or in PyTorch, the share of the time in native ops, seconds to compile, and medians of
calls. It has peak memory: of the process, and what compiling and one call add, beside ONNX Runtime's. By `compile` it
says the number of graphs and of plans, why ops run in PyTorch, and the seconds inside blockconv.

`bench/graphs.txt` names 60 samples (`--list`). They are every k-th sample with weights of each family, in the order of
names, from number k // 2 on. k is 25 for timm, 11 for torchvision and mmpose, 10 for ultralytics, 14 for mmseg, and 3
for torchaudio.
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .graph_samples import fit_norms, read_sample
from .machine import memory_added

__all__ = ["PEERS", "RESULTS", "TIMINGS", "WAYS", "foreign_ops", "run_all", "samples", "summary", "table"]

WAYS = ("onnx", "from_torch", "compile")
TIMINGS = ("none", "calls", "inductor")
PEERS = ("pytorch", "onnxruntime", "openvino", "inductor")
NEAR = 1e-3  # of the largest output: an error that many layers of float32 explain
Result = dict[str, Any]
RESULTS = ("ok", "wrong", "refused", "failed", "timeout", "unusable")


def samples(folder: Path, families: Sequence[str], every: int) -> list[Path]:
    """Each `every`-th sample of each family in the order of names. Samples without weights do not count."""
    found: list[Path] = []
    for family in families or sorted(path.name for path in folder.iterdir() if path.is_dir()):
        named = sorted(path.parent for path in (folder / family).glob("*/weight_meta.py"))
        found += named[::every]
    return found


def run_all(
    paths: Sequence[Path], way: str, out: Path | None, *, threads: int, timeout: float, memory: int, timing: str
) -> Iterator[Result]:
    """The result of each sample. Results in `out` are not measured again.

    memory: bytes that one may use. timing: of TIMINGS. "none": whether results are right is all. "inductor": Inductor's
    calls too.
    """
    known: dict[str, Result] = {}
    if out is not None and out.exists():
        known = {one["name"]: one for one in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
    for path in paths:
        name = f"{path.parent.name}/{path.name}"
        if name not in known:
            known[name] = {"name": name, "way": way, **_in_process(path, way, threads, timeout, memory, timing)}
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[name]) + "\n")
        yield known[name]


def _in_process(path: Path, way: str, threads: int, timeout: float, memory: int, timing: str) -> Result:
    command = [sys.executable, "-m", "bench.graphs", str(path), way, str(threads), str(memory), timing]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"result": "timeout", "why": f"more than {timeout:.0f} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            found: Result = json.loads(line)
            return found
    return {"result": "failed", "why": f"the process ended with {done.returncode}: {done.stderr[-300:]}"}


def table(results: Sequence[Result]) -> str:
    """A line for each sample, in the order of names: result, error, share of the time in native ops, foreign ops."""
    lines = ["name\tresult\terror\tnative\tforeign"]
    for one in sorted(results, key=lambda one: str(one["name"])):
        numbers = [f"{one[key]:{form}}" if key in one else "" for key, form in (("error", ".1e"), ("share", ".3f"))]
        lines.append("\t".join([one["name"], one["result"], *numbers, foreign_ops(one)]).rstrip())
    return "\n".join(lines) + "\n"


def foreign_ops(one: Result) -> str:
    """The foreign ops of a result, and how often each occurs."""
    return " ".join(f"{op}*{count}" for op, count in one.get("foreign", {}).items())


def summary(results: Sequence[Result]) -> str:
    """A line for each family, ops that did not run natively, and speed beside the peers."""
    families: dict[str, list[Result]] = {}
    for one in results:
        families.setdefault(one["name"].partition("/")[0], []).append(one)
    lines = [_counted(name, members) for name, members in families.items()]
    if len(families) > 1:
        lines.append(_counted("all", results))
    foreign: Counter[str] = Counter()
    for one in results:
        foreign.update(one.get("foreign", {}).keys())
    if foreign:
        lines.append("samples with such ops: " + ", ".join(f"{op} {count}" for op, count in foreign.most_common(25)))
    for peer in PEERS:
        ratios = [one[peer] / one["ours"] for one in results if one.get(peer) and one.get("ours")]
        if ratios:
            mean = float(np.exp(np.mean(np.log(ratios))))
            below = sum(ratio < 1 for ratio in ratios)
            lines.append(f"{mean:.2f} times as fast as {peer} (geometric mean of {len(ratios)}), slower on {below}")
    return "\n".join(lines)


def _counted(name: str, results: Sequence[Result]) -> str:
    """How many samples there are of each result, and how many run natively."""
    counts, shares = Counter(one["result"] for one in results), [one["share"] for one in results if "share" in one]
    said = ", ".join(f"{counts[key]} {key}" for key in RESULTS if counts[key])
    native = f"; native for 0.95 of the time or more: {sum(x >= 0.95 for x in shares)} of {len(shares)}"
    return f"{name}: {len(results)} samples: {said}{native if shares else ''}"


# ---------------------------------------------------------------- one sample


def _drawn(call: Callable[..., Any], *inputs: Any) -> Any:
    """A call, which draws the random numbers that other calls draw."""
    import torch

    torch.manual_seed(0)
    return call(*inputs)


def _flat(found: Any, dtype: str = "float") -> list[np.ndarray]:
    """The tensors of a result, in order, as arrays of a type of PyTorch."""
    import torch

    if isinstance(found, torch.Tensor):
        return [getattr(found.detach(), dtype)().numpy()]
    if isinstance(found, np.ndarray):
        return [found]
    if isinstance(found, dict):
        found = list(found.values())
    return [array for one in found for array in _flat(one, dtype)] if isinstance(found, (list, tuple)) else []


def _error(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest difference, of the largest value of each output."""
    if [x.shape for x in found] != [x.shape for x in wanted]:
        return float("inf")
    errors = [0.0]
    for x, y in zip(found, wanted, strict=True):
        if not x.size:
            continue
        with np.errstate(invalid="ignore"):
            off = np.abs(x.astype("f8") - y.astype("f8"))
        off = np.where((np.isnan(x) & np.isnan(y)) | (x == y), 0, off)
        scale = np.max(np.abs(y), initial=0, where=np.isfinite(y)) or 1
        errors.append(float(np.nan_to_num(off, nan=np.inf).max() / scale))
    return max(errors)


def _judged(ours: list[np.ndarray], wanted: list[np.ndarray], theirs: float, module: Any, inputs: Any) -> Result:
    """Whether outputs are right: near PyTorch's, or as near as these to what PyTorch computes in float64.

    Random weights make some networks so unstable that two right results share no digit.
    """
    found: Result = {"error": _error(ours, wanted)}
    right = found["error"] <= max(NEAR, 3 * theirs)
    if not right:
        with contextlib.suppress(Exception):  # a model may name its types
            exact = _flat(module.double()(*[x.double() if x.is_floating_point() else x for x in inputs]), "double")
            found |= {"of_double": _error(ours, exact), "pytorch_of_double": _error(wanted, exact)}
            right = found["of_double"] <= 3 * found["pytorch_of_double"]
        module.float()
    return {**found, "result": "ok" if right else "wrong"}


def _seconds(call: Callable[[], Any], timing: str, budget: float = 2.0) -> float | None:
    """The median of at least three calls."""
    times: list[float] = []
    while timing != "none" and (len(times) < 3 or (sum(times) < budget and len(times) < 15)):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) if times else None


def _planned(network: Any, found: Result, threads: int) -> Any:
    """A plan, and what is known of it before it runs."""
    import blockconv as bc

    start = time.perf_counter()
    plan = bc.compile(network, threads=threads)
    found["compile"] = time.perf_counter() - start
    found["foreign"] = dict(Counter(kind for action in plan.actions if action.part for kind in action.part.kinds))
    return plan


def _shares(plan: Any, *inputs: Any, **named: Any) -> Result:
    """The share of the time of a plan that is in native ops, and the ops and kernels with the largest shares."""
    profile = plan.profile(*inputs, runs=1, **named)
    total, native, each = sum(profile.seconds), 0.0, Counter[str]()
    for action, seconds in zip(profile.actions, profile.seconds, strict=True):
        native += 0.0 if action.part else seconds / total
        name = "+".join(sorted({*action.part.kinds})) if action.part else f"{action.kind} {action.kernel}"
        each[name] += seconds / total
    return {"share": native, "shares": {name: round(share, 3) for name, share in each.most_common(8)}}


def _exported(module: Any, inputs: tuple[Any, ...]) -> bytes:
    import io

    import torch

    file = io.BytesIO()
    torch.backends.mha.set_fastpath_enabled(False)  # which has no ONNX ops
    torch.onnx.export(module, inputs, file, dynamo=False, opset_version=18)
    return file.getvalue()


def _by_onnx(module: Any, inputs: tuple[Any, ...], wanted: list[np.ndarray], threads: int, timing: str) -> Result:
    import onnxruntime as ort

    import blockconv as bc

    try:
        model = _exported(module, inputs)
    except Exception as error:
        return {"result": "unusable", "why": f"export: {type(error).__name__}: {str(error)[:200]}"}
    found: Result = {}
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    with memory_added(found, "their_memory"):
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        feeds = {one.name: x.numpy() for one, x in zip(session.get_inputs(), inputs, strict=False)}
        theirs = [np.asarray(x, np.float32) for x in session.run(None, feeds)]
    with memory_added(found, "our_memory"):
        plan = _planned(bc.load_onnx(model), found, threads)
        values = plan.by_name(**feeds)
    ours = [np.asarray(values[one.name], np.float32) for one in session.get_outputs()]
    return {
        **found,
        **_shares(plan, **feeds),
        "values": ours,
        "theirs": _error(theirs, wanted),
        "ours": _seconds(lambda: plan(**feeds), timing),
        "onnxruntime": _seconds(lambda: session.run(None, feeds), timing),
        **(_by_openvino(model, list(feeds.values()), threads, timing) if timing != "none" else {}),
    }


def _by_openvino(model: bytes, inputs: Sequence[np.ndarray], threads: int, timing: str) -> Result:
    """OpenVINO's seconds a call, in float32; why not, where it refuses the model."""
    import io

    try:
        import openvino as ov

        core = ov.Core()
        options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        compiled = core.compile_model(core.read_model(io.BytesIO(model)), "CPU", options)
        request = compiled.create_infer_request()
        return {"openvino": _seconds(lambda: request.infer(list(inputs), share_inputs=True), timing)}
    except Exception as error:
        return {"openvino_failed": f"{type(error).__name__}: {str(error)[:200]}"}


def _by_from_torch(module: Any, inputs: tuple[Any, ...], wanted: list[np.ndarray], threads: int, timing: str) -> Result:
    import blockconv as bc

    found: Result = {}
    start = time.perf_counter()
    network = bc.from_torch(module, inputs)
    found["read"] = time.perf_counter() - start
    with memory_added(found, "our_memory"):
        plan = _planned(network, found, threads)
        ours = _flat(_drawn(plan, *inputs))
    return {
        **found,
        **_shares(plan, *inputs),
        "values": ours,
        "ours": _seconds(lambda: plan(*inputs), timing),
    }


def _by_compile(module: Any, inputs: tuple[Any, ...], wanted: list[np.ndarray], threads: int, timing: str) -> Result:
    import torch

    from blockconv.torch import report

    fast = torch.compile(module, backend="blockconv", options={"threads": threads})
    start = time.perf_counter()
    values = _flat(_drawn(fast, *inputs))
    seconds = time.perf_counter() - start
    graphs = list(report(fast))
    found = {
        "values": values,
        "taken": sum(graph.taken for graph in graphs),
        "nodes": sum(graph.nodes for graph in graphs),
        "foreign": dict(Counter(line.partition(":")[0] for graph in graphs for line in graph.refused)),
        "left": [line for graph in graphs for line in graph.refused],
        "failed": [line for graph in graphs for line in graph.failed],
        "graphs": len(graphs),
        "plans": sum(graph.plans for graph in graphs),
        "compile": seconds,
        "inside": sum(graph.seconds for graph in graphs),
        "share": _share_of_parts(lambda: fast(*inputs), [part for graph in graphs for part in graph.parts]),
        "ours": _seconds(lambda: fast(*inputs), timing),
    }
    if timing == "inductor":
        found |= _by_inductor(module, inputs)
    return found


def _share_of_parts(call: Callable[[], Any], parts: Sequence[Any]) -> float:
    """The share of a call's CPU time inside these modules, but for graphs with a part that has no plan."""
    times: list[float] = []
    hooks = []
    for part in parts:
        if part.record.failed:
            continue
        hooks.append(part.register_forward_pre_hook(lambda *_: times.append(-time.process_time())))
        hooks.append(part.register_forward_hook(lambda *_: times.append(time.process_time())))
    start = time.process_time()
    for _ in range(3):
        call()
    whole = time.process_time() - start
    for hook in hooks:
        hook.remove()
    return sum(times) / whole


def _by_inductor(module: Any, inputs: tuple[Any, ...]) -> Result:
    """Inductor with freezing: seconds of the first call, and of others."""
    import torch
    from torch._inductor import config

    config.freezing, config.compile_threads = True, 1
    torch._dynamo.reset()
    try:
        theirs = torch.compile(module)
        start = time.perf_counter()
        theirs(*inputs)
        seconds = time.perf_counter() - start
        return {"inductor_compile": seconds, "inductor": _seconds(lambda: theirs(*inputs), "calls")}
    except Exception as error:
        return {"inductor_failed": f"{type(error).__name__}: {str(error)[:200]}"}


def _run(path: Path, way: str, threads: int, memory: int, timing: str) -> Result:
    import torch

    from blockconv.core.errors import UnsupportedError

    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    try:
        module, inputs = read_sample(path)
        fit_norms(module, inputs)
        with torch.no_grad():
            wanted = _flat(_drawn(module, *inputs))
    except Exception as error:
        return {"result": "unusable", "why": f"PyTorch: {type(error).__name__}: {str(error)[:200]}"}
    with torch.no_grad():
        try:
            found = {"onnx": _by_onnx, "from_torch": _by_from_torch, "compile": _by_compile}[way](
                module, inputs, wanted, threads, timing
            )
        except UnsupportedError as error:
            return {"result": "refused", "why": str(error)[:900]}
        except Exception as error:
            return {"result": "failed", "why": f"{type(error).__name__}: {str(error)[:900]}"}
        if "result" not in found:
            found |= _judged(found.pop("values"), wanted, found.get("theirs", 0.0), module, inputs)
            found["pytorch"] = _seconds(lambda: module(*inputs), timing)
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(_run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])))
