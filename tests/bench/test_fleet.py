"""Suites on the machines of Dask's workers: each case once on each kind of processor, whatever disappears."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bench.__main__ import main
from bench.results import load

distributed = pytest.importorskip("distributed")
pytest.importorskip("matplotlib")

from bench import fleet, page, standings  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_a_machine_is_told_neither_of_the_scheduler_nor_of_files() -> None:
    asked = ["nets", "--networks", "a", "b", "--quick"]
    given = [*asked, "--out", "x", "--scheduler", "tcp://h:1", "--resume", "--html", "y", "--threads", "1", "2"]
    assert fleet._without_output(given) == [*asked, "--threads", "1", "2"]
    assert fleet._without_output(["layers", "--out", "--scheduler", "s", "--cold"]) == ["layers", "--cold"]


def test_cases_are_chosen_by_their_keys(capsys: Any) -> None:
    assert main(["layers", "--peers", "--problem", "mb1ic4ih8oc4kh3ph1", "--case", "layers|problem=x"]) == 2
    assert "layers|problem=mb1ic4ih8oc4kh3ph1" in capsys.readouterr().out.replace("\n", "")


def one_file(cpu: str, microseconds: float, *keys: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    headers = [{"machine": {"cpu": cpu, "isa": "avx2", "host": host}, "command": []} for host in ("one", "two")]
    timing = {"median": microseconds * 1e3, "q1": 1.0, "q3": 2.0}
    entry = {"name": "ours auto", "role": "ours", "version": "1", "verdict": "ok", "timing": timing, "error": 0.0}
    case = {"suite": "nets", "entries": [entry], "speedups": {}, "others": 0.0, "flops": 1, "peak": 2, "images": 1}
    return headers, {key: case | {"key": key, "title": f"net {key}", "params": {"threads": 1}} for key in keys}


def test_machines_stand_side_by_side() -> None:
    files = [one_file("A", 10, "k", "only here"), one_file("B <x>", 20, "k")]
    grid = standings.machines_grid(files)
    assert grid is not None
    assert (grid.heads, grid.rows) == (("case", "A", "B <x>"), [("net k", "10 µs", "20 µs")])
    assert standings.machines_grid([one_file("A", 10, "a"), one_file("B", 10, "b")]) is None
    text = page.render(files, "both")
    assert "<th>case</th><th>A</th><th>B &lt;x&gt;</th>" in text
    assert all(f"<p>{host}: A" in text for host in ("one", "two"))


@pytest.fixture
def scheduler() -> Iterator[str]:
    with distributed.LocalCluster(n_workers=0, processes=True, dashboard_address=":0") as cluster:
        yield cluster.scheduler_address


def a_machine(scheduler: str, host: str, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "distributed.cli.dask_worker", scheduler, "--no-nanny", "--nthreads", "1"]
    known = os.environ | {"PYTHONPATH": str(ROOT), fleet.HOST: host} | environment
    return subprocess.Popen([*command, "--no-dashboard"], env=known, cwd=ROOT)


def a_network(path: Path, channels: int) -> Path:
    weight = np.random.default_rng(0).standard_normal((channels, 3, 3, 3)).astype(np.float32)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 3, 16, 16))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, channels, 14, 14))
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"])], "n", [x], [y], [numpy_helper.from_array(weight, "w")]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8), path)
    return path


@pytest.mark.nightly
def test_machines_export_networks_and_go_on(scheduler: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from bench.dataset import store

    networks = [str(a_network(tmp_path / f"net{channels}.onnx", channels)) for channels in (4, 6)]
    command = ["lab", "--export", str(tmp_path / "set"), "--scheduler", scheduler, "--layouts", "NHWC", "NCHW"]
    command += ["--quick", "--samples", "2", "--networks"]
    worker = a_machine(scheduler, "one")
    try:
        with distributed.Client(scheduler) as client:
            client.wait_for_workers(1, timeout=120)
        assert main([*command, networks[0]]) == 0
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*.parquet")}
        assert main([*command, *networks]) == 0
    finally:
        worker.kill()
        worker.wait()
    found = [*store.kept(tmp_path / "set")]
    assert sorted(one.network for one in found) == ["net4", "net6"]
    assert len({one.run for one in found}) == 1  # records of one machine differ by their dates alone
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())
    assert all(share == 1 for one in found for share in one.graph["coverage"].values())


@pytest.mark.nightly
def test_a_machine_that_disappears_loses_its_case_which_runs_again(scheduler: str, tmp_path: Path) -> None:
    """Two workers of one kind, and one of another kind; one of the two is killed while it measures."""
    other = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"}
    workers = {host: a_machine(scheduler, host) for host in ("one", "two")}
    workers["three"] = a_machine(scheduler, "three", **other)
    networks = [a_network(tmp_path / f"net{channels}.onnx", channels) for channels in (4, 6, 8)]
    command = ["-m", "bench", "nets", "--quick", "--budget", "1", "--peers", "--networks", *map(str, networks)]
    command += ["--scheduler", scheduler, "--out", str(tmp_path / "results"), "--html", str(tmp_path / "page.html")]
    try:
        with distributed.Client(scheduler) as client:
            client.wait_for_workers(3, timeout=120)
            hosts = {host: address for address, (host, _) in client.run(fleet._where).items()}
            run = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
            until = time.monotonic() + 120
            while not client.processing().get(hosts["one"]):
                assert run.poll() is None, run.communicate()
                assert time.monotonic() < until
                time.sleep(0.05)
            workers["one"].send_signal(signal.SIGKILL)
            told, _ = run.communicate(timeout=400)
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    assert run.returncode == 0, told
    assert "its machine disappeared; it runs again" in told
    files = sorted((tmp_path / "results").glob("*/nets.jsonl"))
    kinds = {path.parent.name: load(path) for path in files}
    assert len(kinds) >= 1, told
    seen = {}
    for headers, cases in kinds.values():
        assert sorted(Path(case["params"]["network"]).name for case in cases.values()) == sorted(
            p.name for p in networks
        )
        assert all(entry["verdict"] == "ok" and "timing" in entry for c in cases.values() for entry in c["entries"])
        assert {header["machine"]["host"] for header in headers} == {case["host"] for case in cases.values()}
        seen |= {header["machine"]["host"]: header["machine"] for header in headers}
    assert set(seen) == {"two", "three"}
    assert seen["three"]["numba_cpu"] == "haswell"
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "two: " in text
    assert len(kinds) == 1 or "Machines side by side" in text
