"""Runs random networks in blockconv and its peers for a given time: see `fuzz_graphs` and `fuzz_oracle`.

    python tests/support/fuzz_networks.py --minutes 60 --seed 0 --jobs 1

prints one line for each finding, with its seed and the ops of a smaller model that shows it, and a summary. Models run
in a process of their own, so that a crash is a finding like others.

    python tests/support/fuzz_networks.py --show 123

prints the model of a seed, all that is found of it, and a smaller model that shows it.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import pickle
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
from fuzz_graphs import Case, generate
from fuzz_oracle import PEERS, VERDICTS, Finding, judge, onnx_runtime, reference, worst

__all__ = ["Worker", "kind", "run", "smaller", "summary"]

RENEWED = 150  # models that a process runs
PATIENCE = 300.0  # seconds for one model, on a machine that others use too
ENDED = "the process ended"
TOLD = ("crash", "wrong", "undecided")  # verdicts that are shown one by one


class Worker:
    """A process that judges models. plans: see `fuzz_oracle.blockconv`."""

    def __init__(self, plans: bool = True) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.count, self.phase = 0, "start"
        # glibc fills new and freed memory with a pattern, so that reading it gives wrong results.
        environment = {**os.environ, "MALLOC_PERTURB_": "170", "PYTHONFAULTHANDLER": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", *([] if plans else ["--no-plans"])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
        )

    def judge(self, case: int | Case) -> list[Finding]:
        """The findings of a seed or a case. A process that ends, or takes more than PATIENCE, is a finding too."""
        assert self.process.stdin
        self.count, self.phase = self.count + 1, "start"
        try:
            self.process.stdin.write(base64.b64encode(pickle.dumps(_packed(case))) + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return [self._ended()]
        until = time.monotonic() + PATIENCE
        for line in self._lines(until):
            kind, _, text = line.partition(" ")
            if kind == "done":
                return [Finding(*one) for one in json.loads(text)]
            if kind == "phase":
                self.phase = text
        if time.monotonic() >= until:
            self.close()
            return [Finding("crash", self.phase, f"no answer in {PATIENCE:.0f} s")]
        return [self._ended()]

    def _lines(self, until: float) -> Iterator[str]:
        out = self.process.stdout
        assert out
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            kept = b""
            while selector.select(max(0.0, until - time.monotonic())):
                part = os.read(out.fileno(), 1 << 16)
                if not part:
                    return
                *lines, kept = (kept + part).split(b"\n")
                yield from (line.decode() for line in lines)

    def _ended(self) -> Finding:
        code = self.process.wait()
        self.errors.seek(0)
        said = [line for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
        why = next((line for line in said if "rror" in line or "corrupt" in line), "")
        return Finding("peer wrong" if self.phase in PEERS else "crash", self.phase, f"{ENDED} with {code}: {why}")

    @property
    def is_worn(self) -> bool:
        return self.count >= RENEWED or self.process.poll() is not None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            assert stream
            stream.close()


def _packed(case: int | Case) -> Any:
    return case if isinstance(case, int) else (case.model.SerializeToString(), case.feeds, case.kind)


def _work(plans: bool) -> None:
    """The loop of a worker: reads one case a line, and answers with its findings."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of other libraries do not mix with the answers

    def say(kind: str, text: str) -> None:
        out.write(f"{kind} {text}\n")
        out.flush()

    for line in sys.stdin.buffer:
        given = pickle.loads(base64.b64decode(line))
        seed = given if isinstance(given, int) else 0
        try:
            case = generate(seed) if isinstance(given, int) else Case(onnx.load_from_string(given[0]), *given[1:])
            found = judge(case, lambda phase: say("phase", phase), seed, plans)
        except Exception as error:
            found = [Finding("crash", "fuzzer", f"{type(error).__name__}: {error}")]
        say("done", json.dumps(found))


# ---------------------------------------------------------------- smaller models


def smaller(case: Case, shows: Callable[[Case], bool], tries: int = 60) -> Case:
    """Drops nodes while the model still `shows` the finding."""
    while True:
        for made in _less(case):
            tries -= 1
            if tries < 0:
                return case
            if made.model.graph.node and shows(made):
                case = made
                break
        else:
            return case


def _less(case: Case) -> Iterator[Case]:
    """Smaller models: fewer outputs, one size, an intermediate value as output or as input, or a node bypassed."""
    names = [value.name for value in case.model.graph.output]
    if len(names) > 1:
        yield from (_pruned(case, [name]) for name in names)
    if len(case.feeds) > 1:
        yield from (case._replace(feeds=(feeds,)) for feeds in case.feeds)
    nodes = list(case.model.graph.node)
    for node in nodes[:-1]:
        if node.output[0] not in names:
            yield _pruned(case, [node.output[0]])
    if len(case.feeds) == 1:
        yield from filter(None, (_fed(case, name) for node in nodes for name in node.output if name not in names))
    yield from (_without(case, i) for i in range(len(nodes) - 1, -1, -1))


def _pruned(case: Case, outputs: list[str]) -> Case:
    """The part of the model that these outputs need."""
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    graph, needed, nodes = model.graph, set(outputs), []
    for node in reversed(graph.node):
        if needed & set(node.output):
            needed |= set(node.input)
            nodes.append(node)
    given = [onnx.helper.make_empty_tensor_value_info(name) for name in outputs]
    given = [next((value for value in graph.output if value.name == empty.name), empty) for empty in given]
    made = onnx.helper.make_graph(
        nodes[::-1],
        graph.name,
        [value for value in graph.input if value.name in needed],
        given,
        [tensor for tensor in graph.initializer if tensor.name in needed],
    )
    model.graph.CopyFrom(made)
    feeds = tuple({name: x for name, x in feeds.items() if name in needed} for feeds in case.feeds)
    return case._replace(model=model, feeds=feeds)


def _fed(case: Case, name: str) -> Case | None:
    """The model with a value that is computed as an input."""
    made = _pruned(case, [name])
    try:
        value = onnx_runtime(made.model, made.feeds[0])[name]
    except Exception:
        return None
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    for node in model.graph.node:
        node.output[:] = ["" if output == name else output for output in node.output]
    dtype = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
    model.graph.input.append(onnx.helper.make_tensor_value_info(name, dtype, value.shape))
    feeds = ({**case.feeds[0], name: np.asarray(value)},)
    return _pruned(case._replace(model=model, feeds=feeds), [value.name for value in model.graph.output])


def _without(case: Case, at: int) -> Case:
    """The model whose node `at` only passes its first input on."""
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    node = model.graph.node[at]
    source = next((name for name in node.input if name), "")
    for other in model.graph.node:
        other.input[:] = [source if name == node.output[0] else name for name in other.input]
    outputs = [source if value.name == node.output[0] else value.name for value in model.graph.output]
    return _pruned(case._replace(model=model), list(dict.fromkeys(outputs)))


# ---------------------------------------------------------------- a long run


def kind(node: Any) -> str:
    """An op's name, as `blockconv ops` has it."""
    return ".".join(filter(None, (node.domain, node.op_type)))


def _launches(case: Case) -> str:
    graph = case.model.graph
    return f"{case.kind}, opset {case.model.opset_import[0].version}: {' '.join(map(kind, graph.node))}"


def _shrunk(case: Case, found: Finding, plans: bool) -> Case:
    """A smaller case of the same verdict, in the same way of running it."""
    worker, until = Worker(plans), time.monotonic() + 2 * PATIENCE

    def shows(made: Case) -> bool:
        nonlocal worker
        if time.monotonic() > until:
            return False
        if worker.is_worn:
            worker.close()
            worker = Worker(plans)
        return any(one.verdict == found.verdict and _way(one) == _way(found) for one in worker.judge(made))

    try:
        return smaller(case, shows)
    finally:
        worker.close()


def _way(found: Finding) -> tuple[str, str]:
    """The property that a smaller model keeps: the kind of an error, or else the path."""
    kind = found.says.partition(":")[0]
    if "Error" in kind:
        return "", kind
    return found.path.partition(",")[0], kind if found.verdict == "crash" else ""


def run(
    seeds: Iterator[int], until: float, jobs: int = 1, shrink: bool = True, plans: bool = True
) -> dict[int, list[Finding]]:
    """The findings of each seed. Prints those of TOLD as they come.

    seeds: an iterator that threads may share, such as `itertools.count`. until: of `time.monotonic`.
    """
    results: dict[int, list[Finding]] = {}

    def work() -> None:
        worker = Worker(plans)
        for seed in seeds:
            if time.monotonic() > until:
                break
            if worker.is_worn:
                worker.close()
                worker = Worker(plans)
            results[seed] = worker.judge(seed)
            if worker.is_worn and worker.count > 1 and _is_end(results[seed]):  # memory may be broken since another
                alone = Worker(plans)
                found = alone.judge(seed)
                alone.close()
                results[seed] = found if _is_end(found) else [results[seed][0]._replace(verdict="crash"), *found]
            found = worst(results[seed])
            if found.path == "fuzzer":
                print(f"seed {seed}: {_line(found.says)}", flush=True)
            elif found.verdict in TOLD:
                case = generate(seed)
                small = _shrunk(case, found, plans) if shrink else case
                print(
                    f"seed {seed}: {found.verdict}: {found.path}: {_line(found.says)} [{_launches(small)}]", flush=True
                )
        worker.close()

    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(work) for _ in range(jobs)]:
            done.result()
    return results


def _is_end(found: list[Finding]) -> bool:
    """Whether the process ended."""
    return len(found) == 1 and found[0].says.startswith(ENDED)


def _line(text: str) -> str:
    return " ".join(text.split())[:300]


def summary(results: dict[int, list[Finding]]) -> str:
    verdicts = Counter(worst(found).verdict for found in results.values())
    refused = Counter(_sentence(one.says) for found in results.values() for one in found if one.verdict == "refused")
    lines = [f"{len(results)} models: " + ", ".join(f"{verdicts[v]} {v}" for v in VERDICTS if verdicts[v])]
    return "\n".join([*lines, *(f"  refused {count} times: {text}" for text, count in refused.most_common(12))])


def _sentence(text: str) -> str:
    """A refusal without names."""
    return _line("".join("…" if k % 2 else part for k, part in enumerate(text.split("'"))))[:140]


def _show(seed: int, plans: bool) -> None:
    case, worker = generate(seed), Worker(plans)
    found = worker.judge(seed)
    worker.close()
    _print(case)
    for one in found:
        print(f"{one.verdict}: {one.path}: {one.says}")
    if worst(found).verdict in TOLD:
        small = _shrunk(case, worst(found), plans)
        print("\nA smaller model:")
        _print(small)
        np.set_printoptions(threshold=20)
        for name, run in (("onnxruntime", onnx_runtime), ("reference", reference)):
            try:
                print(name, run(small.model, small.feeds[0]))
            except Exception as error:
                print(name, _line(str(error)))


def _print(case: Case) -> None:
    print(re.sub(r"\{[^{}]{400,}\}", "{…}", onnx.printer.to_text(case.model)))
    for feeds in case.feeds:
        print("fed", {name: (x.shape, str(x.dtype)) for name, x in feeds.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run models")
    parser.add_argument("--show", type=int, metavar="SEED", help="the model of one seed, and what is found of it")
    parser.add_argument("--no-plans", action="store_true", help="evaluate alone: ten times as many models")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        _work(not given.no_plans)
    elif given.show is not None:
        _show(given.show, not given.no_plans)
    else:
        results = run(
            itertools.count(given.seed), time.monotonic() + 60 * given.minutes, given.jobs, plans=not given.no_plans
        )
        print(summary(results))
        if any(worst(found).verdict in ("crash", "wrong") for found in results.values()):
            sys.exit(1)


if __name__ == "__main__":
    main()
