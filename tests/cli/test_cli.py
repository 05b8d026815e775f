"""The command line."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import blockconv as bc
from blockconv.__main__ import main
from blockconv.cli import arguments
from blockconv.cli import run as compare_plans
from blockconv.cli.doctor import findings
from blockconv.core import target
from blockconv.machine import identity
from blockconv.machine.profile import _selected, committed, profile


@pytest.fixture(autouse=True)
def _threads() -> Any:
    yield
    bc.set_num_threads(None)


def test_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layouts"]) == 0
    said = capsys.readouterr().out
    for row in bc.known_layouts():
        assert row.name in said
        assert row.tag in said


def test_the_table_of_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layouts", "--markdown"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("| layout | tag |")
    rows = [line.split("|") for line in said.splitlines()[2:]]
    assert [row[1].strip(" `") for row in rows] == [row.name for row in bc.known_layouts()]
    assert [row[5].strip() == "native" for row in rows] == [bc.Layout(row.name).is_native for row in bc.known_layouts()]
    assert {layout.name for layout in bc.NATIVE} < {row[1].strip(" `") for row in rows if row[5].strip() == "native"}


@pytest.mark.slow
def test_the_table_of_onnx_ops(capsys: pytest.CaptureFixture[str]) -> None:
    onnx = pytest.importorskip("onnx")
    from blockconv.frontends.onnx.ops import OPS

    assert main(["ops", "--markdown"]) == 0
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines()[2:]]
    listed = sorted(name for row in rows for name in row[0].split(", "))
    if onnx.defs.onnx_opset_version() >= 24:  # an older onnx does not know them all
        assert listed == sorted(OPS)
    between = [row[1].split(" to ") for row in rows if " to " in row[1]]
    assert all(int(first) <= int(last) for first, last in between)
    assert main(["ops"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in listed)


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in ("numba", "llvmlite", "numpy", "python", "affinity", "quota", "threading layer", "registers of"):
        assert word in said
    for fact in (bc.__version__, sys.version.split()[0], bc.get_threading(), target.target_cpu()):
        assert fact in said
    assert bc.jit.cache_directory().name in said.replace("\n", "").replace(" ", "")


@pytest.mark.slow
def test_doctor_tells_the_pool_and_why(run_python: Any) -> None:
    unset = dict.fromkeys(("BLOCKCONV_THREADING", "NUMBA_THREADING_LAYER", "OMP_NUM_THREADS"))

    def threads(before: str = "", **variables: str | None) -> dict[str, str]:
        code = "import json\nfrom blockconv.cli.doctor import findings\nprint(json.dumps(findings()['threads']))"
        return dict(json.loads(run_python(f"{before}\n{code}", **{**unset, **variables}).stdout))

    plain = threads()
    assert plain["because"] == "PyTorch is not in this process"
    assert plain["OpenMP's number (OMP_NUM_THREADS)"] == "not set"
    told = threads(OMP_NUM_THREADS="1", BLOCKCONV_THREADING="workqueue", OMP_WAIT_POLICY="passive")
    assert told["used by a call"] == told["OpenMP's number (OMP_NUM_THREADS)"] == "1"
    assert told["threading layer"] == "workqueue, one call at a time"
    assert told["because"] == "BLOCKCONV_THREADING asks for it"
    assert {"BLOCKCONV_THREADING=workqueue", "OMP_WAIT_POLICY=passive"} <= set(told["variables"].split(", "))
    assert "has to be one of" in threads(BLOCKCONV_THREADING="pthreads")["threading layer"]
    if (torch := importlib.util.find_spec("torch")) is not None:
        beside = threads("import torch")
        assert beside["threading layer"].startswith("openmp, ")
        assert "PyTorch is in this process" in beside["because"]
        assert beside["its library"].startswith(os.path.dirname(str(torch.origin)))


def test_doctor_tells_the_machine_profile_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written one is the median of three, which a test has no time for."""
    mine = dataclasses.replace(profile(), name="mine", record={"cpu": "my processor", "date": "2026-01-02"})
    monkeypatch.setattr("blockconv.cli.plan.measuring.measure", lambda runs: mine)
    monkeypatch.chdir(tmp_path)
    (about,) = [name for name in findings() if "profile" in name]

    def told(**variables: str) -> dict[str, str]:
        with patch.dict(os.environ, variables):
            return findings()[about]

    assert "BLOCKCONV_MACHINE is not set" in told()["because"]
    assert Path(told()["file"]).is_file()
    assert main(["tune", "--profile", "mine.json"]) == 0
    assert told(BLOCKCONV_MACHINE="mine.json") == {
        "name": "mine",
        "measured on": "my processor, 2026-01-02",
        "file": str(tmp_path / "mine.json"),
        "because": "BLOCKCONV_MACHINE names this file",
    }
    named = committed()[-1].name
    assert told(BLOCKCONV_MACHINE=named)["because"] == "BLOCKCONV_MACHINE names this profile"
    assert "is no profile, processor or file" in told(BLOCKCONV_MACHINE="none.json")["name"]
    monkeypatch.setattr(identity, "describe", lambda: {"cpu": "another", "isa": "sse"})
    with patch("blockconv.machine.profile._selected", _selected.__wrapped__):
        why = r"it is the nearest to \S+, for which kernels are compiled; blockconv tune .* of another;"
        assert re.match(why, told()["because"])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> bc.Network:
    """A small network in the place of the one that runs by default."""
    builder = bc.NetworkBuilder("small")
    weight = np.random.default_rng(0).standard_normal((16, 3, 3, 3)).astype(np.float32)
    builder.output(builder.conv2d(builder.input("image", (1, 3, 12, 12)), weight, padding=1, activation="relu"))
    network = builder.build()
    monkeypatch.setattr(arguments, "resnet50", lambda: network)
    return network


def test_run_compares_fixed_layouts_with_the_plan(small: bc.Network, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--layouts", "NHWC", "NCHW16", "--threads", "1", "--batch", "2"]) == 0
    said = capsys.readouterr().out
    assert "small, 2x3x12x12" in said
    rows = {line.split("│")[1].strip(): line.split("│") for line in said.splitlines() if line.startswith("│")}
    assert list(rows) == ["NHWC", "NCHW16", "the chosen plan"]
    assert "in turns on 1 thread. " in said
    assert min(float(row[3]) for row in rows.values()) == 1
    assert [row[4].strip() for row in rows.values()] != ["0"] * 3  # NHWC has to be left at the end


def test_run_says_so_if_plans_differ(
    small: bc.Network, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(bc.Plan):
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            return super().__call__(*inputs, **named) * np.float32(1.001)

    monkeypatch.setattr(bc.Plan, "with_layouts", lambda plan, layouts: Wrong(plan.network, plan.options))
    assert main(["run", "--layouts", "NHWC"]) == 1
    assert "1.0e-03" in capsys.readouterr().out


def test_run_says_each_step_as_it_begins(
    small: bc.Network, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def compiled(network: bc.Network, layouts: str) -> bc.Plan:
        begun.append(capsys.readouterr().err.splitlines())
        return bc.compile(network, layouts=layouts)

    monkeypatch.setattr(compare_plans, "compile", compiled)
    assert main(["run", "--layouts", "NHWC"]) == 0
    said = capsys.readouterr()
    assert "NHWC" in said.out
    lines = [*begun[0], *said.err.splitlines()]
    assert [re.sub(r"^ *\d+\.\d s  ", "", line) for line in lines] == [
        "1 of 4: reading ResNet-50",
        "2 of 4: planning NHWC, compiling its kernels, packing its weights",
        "3 of 4: planning the chosen plan, compiling its kernels, packing its weights",
        "4 of 4: timing 2 plans in turns",
    ]
    assert len(begun[0]) == 2


def test_on_a_terminal_steps_are_one_line_that_goes_away(
    small: bc.Network, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert main(["run", "--layouts", "NHWC"]) == 0
    said = capsys.readouterr().err
    assert "timing 2 plans in turns" in said
    assert "4 of 4" not in said


def test_rounds_end_with_the_time_for_them(small: bc.Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_plans, "BUDGET", 0.0)
    plan = bc.compile(small)
    x = np.zeros((1, 3, 12, 12), np.float32)
    found = [compare_plans.Contestant("auto", plan, 0.0, plan(x))]
    assert [len(times) for times in compare_plans._timed(found, [x])] == [compare_plans.LEAST]


def test_run_with_a_picture_of_ones_own(small: bc.Network, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "mine.png"
    pixels = np.arange(24 * 36 * 3, dtype=np.uint8).reshape(24, 36, 3)
    image.fromarray(pixels).save(path)
    assert np.array_equal(compare_plans.read(path), pixels)
    assert main(["run", "--input", str(path), "--layouts", "NHWC"]) == 0
    given = compare_plans._entering(small.inputs[0], str(path))
    assert given.shape == (1, 3, 12, 12)
    wanted = (pixels[::2, ::3].transpose(2, 0, 1) / 255 - np.array(compare_plans.MEAN)[:, None, None]) / np.array(
        compare_plans.SPREAD
    )[:, None, None]
    assert np.allclose(given[0], wanted, atol=1e-6)


def test_a_model_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx = pytest.importorskip("onnx")
    h = onnx.helper
    values = [h.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 4, 5, 5]) for name in "xy"]
    graph = h.make_graph([h.make_node("Relu", ["x"], ["y"])], "tiny", values[:1], values[1:])
    onnx.save(h.make_model(graph), tmp_path / "tiny.onnx")
    assert main(["run", str(tmp_path / "tiny.onnx"), "--input", "random", "--layouts", "NCHW"]) == 0
    assert "tiny, 1x4x5x5" in capsys.readouterr().out
    assert main(["run", str(tmp_path / "tiny.onnx"), "--input", "mine.png"]) == 2
    assert "no picture" in capsys.readouterr().err.replace("\n", " ")


@pytest.fixture
def open_model(tmp_path: Path) -> str:
    """A model whose image is of any size: a convolution, a residual and a ReLU, which fusion makes one node of."""
    onnx = pytest.importorskip("onnx")
    h = onnx.helper
    weight = onnx.numpy_helper.from_array(np.ones((8, 8, 1, 1), np.float32), "w")
    nodes = [
        h.make_node("Conv", ["x", "w"], ["c"], "node_conv_1"),
        h.make_node("Add", ["c", "x"], ["a"], "node_add_1"),
        h.make_node("Relu", ["a"], ["y"], "node_relu_1"),
    ]
    values = [h.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 8, "h", "w"]) for name in "xy"]
    graph = h.make_graph(nodes, "open", values[:1], values[1:], [weight])
    path = tmp_path / "open.onnx"
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9), path)
    return str(path)


def test_the_precision_of_a_plan_is_asked_for(open_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def compiled(network: bc.Network, *given: Any, precision: str, **others: Any) -> bc.Plan:
        asked.append(precision)
        return bc.compile(network)

    monkeypatch.setattr("blockconv.cli.plan.compile", compiled)
    for given in ([], ["--precision", "bfloat16"]):
        assert main(["plan", open_model, "--shape", "1x8x6x6", *given]) == 0
    assert asked == ["float32", "bfloat16"]
    with pytest.raises(SystemExit):
        main(["plan", open_model, "--precision", "int8"])


def test_a_shape_is_read_before_the_model(open_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", open_model, "--shape", "1x8x6x6"]) == 0
    assert main(["plan", "--shape", "x=2x8x6x6", open_model]) == 0
    assert "node_conv_1" in capsys.readouterr().out
    assert main(["run", open_model, "--shape", "2x8x6x6", "--layouts", "NHWC"]) == 0
    assert "open, 2x8x6x6" in capsys.readouterr().out
    assert main(["run", open_model, "--shape", "1x8x6x6", "--batch", "3", "--layouts", "NHWC"]) == 0
    assert "open, 3x8x6x6" in capsys.readouterr().out
    for wrong, why in (
        ([], "--shape=None: input 'x' has no fixed shape"),
        (["--shape", "1x8xa"], "whole numbers"),
        (["--shape", "z=1x8x6x6"], "is not among the inputs x; give for example --shape 1x3x224x224"),
        (["--shape", "1x8x6x6", "--shape", "x=1x8x6x6"], "has to name an input"),
        (["--shape", "x=1x8x6x6", "--shape", "x=1x8x7x7"], "a different one each time"),
    ):
        for command in ("plan", "run"):
            assert main([command, open_model, *wrong]) == 2
            said = capsys.readouterr().err.replace("\n", " ")
            assert f"error: {command}: --shape" in said
            assert why in said


def test_layouts_of_nodes(open_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", open_model, "--shape", "1x8x6x6", "--layouts"]
    assert main([*command, "node_add_1=NHWC", "--layouts", "node_relu_1=NHWC"]) == 0
    assert "layouts node_conv_1: NHWC" in capsys.readouterr().out
    for wrong in (["node_add_1=NHWC", "--layouts", "NCHW"], ["node_add_1=NHWC", "--layouts", "node_add_1=NCHW"]):
        assert main([*command, *wrong]) == 2
        assert "NODE=LAYOUT" in capsys.readouterr().err.replace("\n", " ")
    assert main([*command, "NHWC", "--layouts", "aBcd40b", "--threads", "1"]) == 0
    said = capsys.readouterr().out
    assert f"layouts auto among NHWC, {bc.Layout('aBcd40b')}" in said  # whatever other tests call it
    assert "Times are for 1 thread." in said


def test_options_are_taken_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["run", "--rep", "plan.html"], ["plan", "--prof"], ["--vers"]):
        with pytest.raises(SystemExit, match="2"):
            main(words)
    assert "--rep" in capsys.readouterr().err


@pytest.mark.parametrize(
    "model", ["(bool[1,3,4,4] x) => (bool[1,3,4,4] y) { y = Not(x) }", "(float x) => (float y) { y = Relu(x) }"]
)
def test_running_bools_and_scalars(model: str, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    onnx.save(onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> m ' + model), tmp_path / "m.onnx")
    assert main(["run", str(tmp_path / "m.onnx"), "--layouts", "NHWC"]) == 0
    assert main(["run", str(tmp_path / "m.onnx"), "--layouts", "NHWC", "--batch", "2"]) == 0
    assert main(["run", str(tmp_path / "m.onnx"), "--layouts", "NHWC", "--shape", "0x3x4x4"]) == 0


def test_what_cannot_be_run(small: bc.Network, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL.Image")
    assert main(["run", "--input", str(tmp_path / "none.png")]) == 2
    (tmp_path / "text.png").write_text("no picture")
    assert main(["run", "--input", str(tmp_path / "text.png")]) == 2
    assert "run: --input=" in capsys.readouterr().err.replace("\n", " ")
    assert main(["run", str(tmp_path / "text.png")]) == 2
    assert main(["run", "--layouts", "aBCd4b4c"]) == 2
    assert main(["run", "--threads", "100000"]) == 2
    assert "set_num_threads: n=100000" in capsys.readouterr().err.replace("\n", " ")
    batches = (["run", "--batch", count] for count in ("many", "0"))
    for wrong in (*batches, ["walk"], [], ["run", "--threads", "a"], ["tune", "--runs", "0"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
    said = capsys.readouterr().err
    assert "--threads: 'a' has to be a whole number of at least 1" in said
    assert "--batch: '0' has to be a whole number of at least 1" in said
    assert "--runs: '0' has to be a whole number of at least 1" in said
    assert main(["run", "--layouts", "nope"]) == 2
    assert "error: run: --layouts='nope': the letter" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "name", "says"),
    [
        ("plan --report", "none/x.html", "none/x.html has no folder"),
        ("plan --report", "x.txt", "x.txt has to end in .html or .htm or .json"),
        ("plan --save", "none/x", "none/x has no folder"),
        ("plan --save", ".", "is a folder"),
        ("run --report", "none/x.html", "has no folder"),
        ("tune --profile", "none/x.json", "has no folder"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_any_work(
    words: str, name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words.split(), str(tmp_path / name)])
    said = capsys.readouterr().err
    assert says in said
    assert " s  1 of" not in said


def test_without_pillow_the_remedy_is_named(
    small: bc.Network, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(["run", "--input", str(tmp_path / "mine.png")]) == 2
    assert "pip install pillow" in capsys.readouterr().err.replace("\n", "")


def test_as_a_module(run_python: Any) -> None:
    assert run_python(["-m", "blockconv", "--version"]).stdout == f"blockconv {bc.__version__}\n"
    run_python(["-m", "blockconv", "nonsense"], status=2)


def test_plan_explains_draws_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = bc.NetworkBuilder("little")
    network.output(network.conv2d(network.input("x", (1, 16, 6, 6)), np.ones((16, 16, 1, 1), np.float32), name="only"))
    saved, page = tmp_path / "plan", tmp_path / "plan.html"
    bc.compile(network.build()).save(saved)
    assert bc.Plan.load(saved).network.name == "little"
    with patch.object(arguments, "resnet50", network.build):
        assert main(["plan", "--layouts", "NCHW16", "--profile", "--report", str(page), "--save", str(saved)]) == 0
    said = capsys.readouterr().out
    assert "only" in said
    assert "NCHW16" in said
    assert "<svg" in page.read_text(encoding="utf-8")
    assert main(["plan", "--shape", "1xa"]) == 2
    assert "--shape" in capsys.readouterr().err
    saved.unlink()
    page.unlink()
    with (
        patch.object(arguments, "resnet50", network.build),
        contextlib.redirect_stdout(io.StringIO()) as full,
        patch.object(full, "write", side_effect=OSError(28, "No space left on device")),
    ):
        assert main(["plan", "--report", str(page), "--save", str(saved)]) == 2
    assert saved.exists()
    assert page.exists()


# ---------------------------------------------------------------- where output and errors leave

ODD = "[/x] [bold]:smile: → µ"


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of names that look like markup, and that few encodings have."""
    onnx = pytest.importorskip("onnx")
    h = onnx.helper
    weight = onnx.numpy_helper.from_array(np.ones((8, 8, 1, 1), np.float32), "w")
    node = h.make_node("Conv", ["x", "w"], ["y"], f"{ODD} node")
    values = [h.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 8, 6, 6]) for name in "xy"]
    graph = h.make_graph([node], f"{ODD} graph", values[:1], values[1:], [weight])
    path = tmp_path_factory.mktemp("models") / f"{ODD} file.onnx".replace("/", "")
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9), path)
    return str(path)


def blockconv(shell: str, *words: str, **variables: str) -> tuple[int, str, str]:
    """The status of the command itself, its output and its errors, as a shell command runs it: `{} | head -1`."""
    command = shlex.join([sys.executable, "-m", "blockconv", *words])
    line = shell.format(f"{{ {command}; echo status $? >&2; }}")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "200", **variables}
    done = subprocess.run(["bash", "-c", line], capture_output=True, env=environment, timeout=300, check=False)
    errors, _, status = done.stderr.decode("utf-8", "replace").rpartition("status ")
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    return int(status), done.stdout.decode(variables.get("PYTHONIOENCODING", "utf-8")), errors


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "ascii"])
@pytest.mark.sampled(3)
def test_any_text_is_printed_as_it_is_in_any_encoding(odd_model: str, encoding: str) -> None:
    status, said, errors = blockconv("{}", "plan", odd_model, "--measure", PYTHONIOENCODING=encoding, FORCE_COLOR="1")
    assert status == 0, errors
    shown = {"utf-8": ODD, "cp1252": ODD.replace("→", ">"), "ascii": ODD.replace("→", ">").replace("µ", "u")}[encoding]
    assert f"{shown} graph: layouts" in said
    assert f"{shown} node" in said
    status, said, errors = blockconv("{}", "run", odd_model, "--layouts", "NHWC", PYTHONIOENCODING=encoding)
    assert status == 0, errors
    assert f"{shown} graph, 1x8x6x6" in said
    assert blockconv("{}", "layouts", PYTHONIOENCODING=encoding)[0] == 0


def test_errors_leave_on_the_error_stream(odd_model: str) -> None:
    status, said, errors = blockconv("{}", "plan", odd_model, "--layouts", f"{ODD}=NHWC", PYTHONIOENCODING="ascii")
    assert (status, said) == (2, "")
    assert "error: [/x] [bold]:smile: > u graph: layouts='[/x] [bold]:smile: > u'" in errors
    assert blockconv("{}", "plan", "none.onnx")[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["ops --markdown", "plan"])
@pytest.mark.sampled(4)
def test_output_that_cannot_be_written_ends_a_command(odd_model: str, words: str, unbuffered: str) -> None:
    given = [*words.split(), *[odd_model] * (words == "plan")]
    assert blockconv("{} | true", *given, PYTHONUNBUFFERED=unbuffered)[0] in (0, 1)
    if os.path.exists("/dev/full"):
        status, _, errors = blockconv("{} > /dev/full", *given, PYTHONUNBUFFERED=unbuffered)
        assert status == 2
        assert "error: [Errno 28]" in errors


def test_closed_streams_take_the_output_away() -> None:
    assert blockconv("{} >&-", "layouts")[:2] == (0, "")
    assert blockconv("{} | head -1", "--help")[0] in (0, 1)


def test_one_place_makes_consoles() -> None:
    """No other text is taken for markup, then."""
    files = {path: path.read_text(encoding="utf-8") for path in Path(bc.__file__).parent.rglob("*.py")}
    makers = [path.name for path, text in files.items() if re.search(r"(?<!def )(?<!-> )\bConsole\(", text)]
    assert makers == ["text.py"]
    columns = [line for text in files.values() for line in text.splitlines() if 'TextColumn("' in line and "{" in line]
    assert columns
    assert all("markup=False" in line for line in columns)
