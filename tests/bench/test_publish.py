"""Kept results: the CPU that they hold for, their folder, and the pages that show them."""

from __future__ import annotations

import sys

import pytest

from bench import cpu, publish, tables
from bench.__main__ import main
from bench.results import ResultFile, compact, load
from blockconv.machine import identity


def layer(name: str, ratio: float) -> dict:
    """A case in which ours takes a second, and the one peer `ratio` of it."""
    ours, peer = ({"name": who, "verdict": "ok", "timing": {"median": 1e9 * time}}
                  for who, time in (("blockconv NHWC", 1.0), ("torch x", ratio)))  # fmt: skip
    return {
        "key": name, "suite": "layers", "title": f"layer {name}, 1 threads", "flops": 2e11,
        "params": {"problem": "ic64ih8oc8kh3ph1", "threads": 1},
        "entries": [ours | {"role": "ours"}, peer | {"role": "peer"}],
        "speedups": {"blockconv NHWC": {"median": ratio, "low": 0.9 * ratio, "high": 1.1 * ratio}},
    }  # fmt: skip


ZEN4 = {"cpu": "AMD EPYC", "numba_cpu": "znver4", "numba_features": ["avx2", "avx512f", "fma"]}


def test_a_cpu_is_named_so_that_models_differ(monkeypatch):
    """A record from before names were full is told apart by what it has."""
    assert cpu.name(ZEN4) == "AMD EPYC (Zen 4, avx512)"
    assert cpu.name({**ZEN4, "numba_cpu": "haswell", "numba_features": ["avx2"]}) == "AMD EPYC (haswell, avx2)"
    facts = "model name\t: Intel(R) Xeon(R)\ncpu family\t: 6\nmodel\t\t: 143\n\nmodel\t\t: 1\n"
    monkeypatch.setattr(identity.target, "read_fact", lambda path: facts)
    monkeypatch.setattr(identity.llvm, "get_host_cpu_name", lambda: "sapphirerapids")
    record = cpu.describe()
    assert cpu.name(record) == f"Intel(R) Xeon(R) (sapphirerapids, family 6 model 143, {record['isa']})"
    assert cpu.folder(record) == f"intel-xeon-sapphirerapids-family-6-model-143-{record['isa']}"


def network(name: str, ratio: float, memory: int = 0) -> dict:
    case = layer(name, ratio) | {"suite": "nets", "params": {"network": name, "batch": 1, "threads": 1}}
    for k, (entry, who) in enumerate(zip(case["entries"], ("blockconv auto", "openvino"), strict=True)):
        entry |= {"name": who, "memory": (k + 1) * memory} if memory else {"name": who}
    return case | {"speedups": {"blockconv auto": {"median": ratio, "low": 0.9 * ratio, "high": 1.1 * ratio}}}


def lab_case(name: str, **seconds: float) -> dict:
    """A network of the lab, and how long each choice takes."""
    entries = [
        {"name": f"blockconv {choice}", "role": "ours", "verdict": "ok", "timing": {"median": 1e9 * time}}
        for choice, time in seconds.items()
    ]
    params = {"network": name, "batch": 1, "threads": 1}
    return {"key": name, "suite": "lab", "title": name, "params": params, "entries": entries, "speedups": {}}


def test_results_are_shown_for_each_cpu(tmp_path, monkeypatch):
    """README has the networks of one CPU; a processor's page has its networks, means, losses and plans."""
    pytest.importorskip("pyarrow")  # of the extra `bench`
    about = {"os": "Linux-6", "affinity": 2, "versions": {"torch": "2.13", "numpy": "2"}}
    kept, planner = tmp_path / "bench" / "results", tmp_path / "docs" / "explanation" / "planner.md"
    for folder in (planner.parent, tmp_path / "docs" / "performance"):
        folder.mkdir(parents=True)
    for folder, machine in (("a", ZEN4), ("b", {"cpu": "M9 (neon)", "isa": "neon"})):
        (kept / folder).mkdir(parents=True)
        lab = lab_case("resnet50", auto=1.0, measured=0.5, NHWC=1.25, NCHW16=2.0)
        files = {"layers": (layer("fast", 2.0), layer("slow", 0.5)), "nets": (network("resnet50", 2.0),), "lab": (lab,)}
        files["nets-recent"] = (network("yolo", 2.0, 10**6),)
        for stem, cases in files.items():
            results = ResultFile(kept / folder / f"{stem}.jsonl", {"machine": {**machine, **about}})
            for case in cases:
                results.add(case)
    for page, what in ((tmp_path / "README.md", "networks"), (planner, "planning")):
        page.write_text(f"before\n{tables.marked(what, 'old')}\nafter")
    monkeypatch.setattr(publish, "FRONT", "AMD EPYC (Zen 4, avx512)")
    publish.write(tmp_path)
    readme, full = (tmp_path / "README.md").read_text(), (kept / "README.md").read_text()
    assert "old" not in readme
    assert "| resnet50 | 1e+03 |" not in readme, "a column is a peer's"
    assert "| resnet50 | 2e+03 | 1e+03 | 2.00 |" in readme
    assert "| yolo |" not in readme, "of one file"
    assert (
        "On 1 more networks, such as yolo, blockconv is 2.00 times as fast as the best engine: 2.00 to 2.00." in readme
    )
    assert "blockconv loses 2 of 8 comparisons" in readme
    assert "0.50 for `layer slow` on M9." in readme
    assert "| resnet50 | +20.0 (NHWC) | +20.0 (NHWC) |" in planner.read_text()
    for stem, said in (("amd-epyc-zen-4", "## AVX-512"), ("m9", "## neon")):
        page = (tmp_path / "docs" / "performance" / f"{stem}.md").read_text()
        assert said in page
        assert "2 cores, Linux, torch 2.13." in page
        assert "| resnet50 | 1e+03 | 2e+03 (openvino) | 2.00 |" in page
        assert "| memory | blockconv | OpenVINO |" in page
        assert "| yolo | 1 MB | 2 MB |" in page
        assert page.count("| memory |") == 1, "where it is known"
        assert "| layers | 1 | 2 | 1 | 0 | 1 | 1.00 |" in page
        assert "| layer slow | 0.50 |" in page
        assert "| resnet50 | +20.0 (NHWC) |" in page
    assert full.count("\n## ") == 2
    assert full.count("| layer slow | 1 | 200 | 400 (torch x) | **0.50** |") == 2


def full_file(path, date: str, ratio: float = 2.0) -> list:
    """A result file as the harness writes it; returns its cases."""
    samples = [1e9 / 3 * k for k in range(1, 32)]
    case = layer("n", ratio) | {"peak": 1e12 / 7, "bandwidth": 1e11 / 7, "bytes": 10**6}
    for entry in case["entries"]:
        entry["timing"] |= {"q1": 9e8 / 7, "q3": 11e8 / 7, "samples": samples, "low": 1.0, "high": 2.0}
        entry |= {"version": "1", "prepare": 5.0, "error": 1 / 3e7, "about": {"predicted": 0.1 + 0.2}}
    results = ResultFile(
        path, {"machine": {**ZEN4, "date": date, "affinity": 2, "versions": {}, "os": "Linux"}, "command": ["layers"]}
    )
    results.add(case)
    return [case]


def test_compact_files_have_what_tables_and_pages_need(tmp_path):
    pytest.importorskip("matplotlib")
    from bench import page as html_page

    (case,) = full_file(tmp_path / "layers.jsonl", "2026-11-25T10:00:00+0000")
    full, kept = tmp_path / "layers.jsonl", compact(tmp_path / "layers.jsonl")
    assert kept.name == "layers.jsonl.gz"
    assert tables.markdown([kept]) == tables.markdown([full])
    assert "layer n" in html_page.render([load(kept)], "kept")
    (headers, found), (wanted, _) = load(kept), load(full)
    assert headers == wanted[-1:]
    (entry, _) = found[case["key"]]["entries"]
    assert set(entry["timing"]) == {"median", "q1", "q3"}
    assert abs(entry["timing"]["q1"] * 7 / 9e8 - 1) < 1e-7
    assert entry["about"]["predicted"] == 0.1 + 0.2
    assert compact(full).read_bytes() == kept.read_bytes()


def test_a_full_file_replaces_older_results_alone(tmp_path):
    full = tmp_path / "layers.jsonl"
    for date, ratio, wanted in (("05T10", 2.0, 2.0), ("04T23", 3.0, 2.0), ("06T01", 4.0, 4.0)):
        full.unlink(missing_ok=True)
        full_file(full, f"2026-11-{date}:00:00+0000", ratio)
        publish.gather(tmp_path)
        (case,) = load(tmp_path / "layers.jsonl.gz")[1].values()
        assert case["speedups"]["blockconv NHWC"]["median"] == wanted


def test_results_in_git_are_compact():
    """All that is kept of them, with the tables and pictures made of them, and a sample of the lab's data set; full
    ones are not for git. The data set's archive has a limit of its own."""
    kept = [path for path in publish.RESULTS.rglob("*") if path.is_file() and path.suffix != ".jsonl"]
    archives = [path for path in kept if path.suffix == ".xz"]
    assert sum(path.stat().st_size for path in kept if path not in archives) < 2_500_000
    assert sum(path.stat().st_size for path in archives) < 20_000_000
    ignored = (publish.ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "bench/results/**/*.jsonl" in ignored


def test_layers_by_algorithm_are_shown_side_by_side(tmp_path):
    """The fastest bold; blank where a type has no kernel of an algorithm."""
    times = {
        ("float32", "direct"): 4.0,
        ("float32", "winograd"): 2.0,
        ("int8", "direct"): 1.0,
        ("int8", "winograd"): None,
    }
    results = ResultFile(tmp_path / "algorithms.jsonl", {"machine": ZEN4})
    for (dtype, algorithm), ratio in times.items():
        case = layer("3x3", 1.0)
        case |= {"key": f"{dtype} {algorithm}", "title": f"3x3, 1 threads, {algorithm}"}
        case["params"] |= {"algorithm": algorithm} | ({} if dtype == "float32" else {"dtype": dtype})
        (ours, _) = case["entries"]
        ours["timing"]["median"] = 1e3 * (ratio or 0)
        results.add(case | {"entries": [ours] if ratio else []})
    text = publish.algorithms({"a processor": [tmp_path / "algorithms.jsonl"]})
    assert text.splitlines()[0] == "1 thread:"
    assert text.splitlines()[2] == "| µs | float32, direct | float32, winograd | int8, direct | int8, winograd |"
    assert text.splitlines()[4] == "| 3x3 | 4 | 2 | **1** |  |"


@pytest.mark.slow
def test_the_figures_that_are_shown_are_generated():
    for page, text in publish.shown().items():
        assert page.read_text(encoding="utf-8") == text, f"run `python -m bench tables`: {page.name} differs"


@pytest.mark.slow
def test_results_are_kept_by_cpu_unless_a_name_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "RESULTS", tmp_path)
    monkeypatch.chdir(tmp_path)
    quick = ["pools", "--quick", "--budget", "0.01", "--layouts", "NHWC", "--peers", "--problem", "mb1ic4ih4oh4kh1"]
    assert main([*quick, "--out"]) == 0
    assert main([*quick, "--out", "mine"]) == 0
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {f"{cpu.folder(cpu.describe())}/pools.jsonl", "mine"}


@pytest.mark.parametrize("suite", ["layers", "pools"])
def test_a_layout_that_is_none_is_refused_before_anything_is_measured(suite, capsys):
    assert main([suite, "--quick", "--layouts", "NHWC", "NCHWX", "--peers"]) == 2
    assert "bench: --layouts='NCHWX'" in capsys.readouterr().out.replace("\n", " ")


def test_a_command_that_misses_a_package_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnx", None)
    for module in ("bench.nets", "bench.commands.nets"):
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.delattr(module, raising=False)
    assert main(["nets"]) == 2
    assert "pip install '.[bench]'" in capsys.readouterr().out
