"""Files of plans and arrays that were damaged, and numbers of threads: an ArgumentError, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv.network import archive, ops


def values(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def little_network() -> bc.Network:
    b = bc.NetworkBuilder("little")
    x = b.conv2d(b.input("x", (1, 3, 6, 6)), values((4, 3, 3, 3)), padding=1, activation=("leaky_relu", 0.1), name="a")
    x = b.max_pool2d(x, 2, name="b")
    b.output(b.add(ops.Resize("nearest", scale=(2.0, 2.0)), x, name="c"))
    return b.build()


@pytest.mark.skipif(os.name == "nt", reason="Windows limits no sizes of files")
def test_a_disk_that_is_full_leaves_every_old_file(tmp_path: Path) -> None:
    import resource

    plan, array = bc.compile(little_network()), bc.to_layout(values((1, 8, 64, 64)), "NCHW8")
    ranges = bc.Calibration({f"value {k}": (0.0, 1.0) for k in range(999)})
    saves = {"a": plan.save, "b": array.save, "c": ranges.save, "d.html": plan.report, "e.json": plan.report}
    for name, save in saves.items():
        save(tmp_path / name)
    before = {name: (tmp_path / name).read_bytes() for name in saves}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, save in saves.items():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                save(tmp_path / name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("measured", [5, "auto", {"auto": "x"}, {"auto": None}, [1.0]])
def test_measured_times_that_are_none(measured: Any, tmp_path: Path) -> None:
    plan = bc.compile(little_network())
    with pytest.raises(bc.ArgumentError, match=r"report: measured=.*has to be \{layouts: seconds\}, or None"):
        plan.report(tmp_path / "page.html", measured)
    assert not list(tmp_path.iterdir())
    plan.report(tmp_path / "page.html", {"auto": np.float32(1e-3)})  # type: ignore[dict-item]


@pytest.mark.parametrize("path", [0, b"plan", None, 2.5])
def test_a_path_that_is_none(path: Any) -> None:
    """`open` would read the standard input, or write over the standard output."""
    plan, array, ranges = bc.compile(little_network()), bc.to_layout(values((1, 8, 2, 2)), "NCHW8"), bc.Calibration({})
    saves = plan.save, plan.report, array.save, ranges.save
    for call in (*saves, bc.Plan.load, bc.BlockedArray.load, bc.Calibration.load):
        with pytest.raises(bc.ArgumentError, match=r": path=.*has to be a file's path"):
            call(path)


@pytest.mark.parametrize("threads", [0, -1, -3, 2.5, True, "2", 10**6])
def test_a_number_of_threads_that_cannot_be(threads: Any, tmp_path: Path) -> None:
    """Nothing runs: a plan for none or fewer would leave its output as it found it."""
    network = little_network()
    with pytest.raises(bc.ArgumentError, match=r"compile: threads=.*has to be an int from 1 to \d+"):
        bc.compile(network, threads=threads)
    bc.compile(network).save(tmp_path / "plan")
    with pytest.raises(bc.ArgumentError, match=r"Plan\.load: threads=.*has to be an int from 1 to \d+"):
        bc.Plan.load(tmp_path / "plan", threads=threads)


def described(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        read: dict[str, Any] = json.loads(bytes(file["network"]))
        return read


def written(path: Path, network: str) -> Path:
    """The file with another description of its network."""
    with np.load(path) as file:
        arrays = {**file, "network": np.frombuffer(network.encode(), np.uint8)}
    np.savez(path.with_suffix(".npz"), **arrays)
    return path.with_suffix(".npz")


def refused(path: Path) -> None:
    """The plan is refused as a file, or, where what was damaged makes no difference, it runs."""
    try:
        plan = bc.Plan.load(path)
    except bc.ArgumentError as error:
        assert "Plan.load" in str(error)  # noqa: PT017
    else:
        plan(np.ones(plan.network.inputs[0].shape, np.float32))


# What plans of version 0.1.0 gave, which saved them.
OF_0_1_0 = {
    "float32": [1.2100307, 0.9019309, -0.3096060, -0.5361486, -0.2174162],
    "int8": [1.2053779, 0.9092260, -0.3165471, -0.5377178, -0.2240462],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_0_1_0)
def test_a_plan_of_an_older_version(name: str) -> None:
    path = Path(__file__).parent / "files" / f"{name}-0.1.0.plan"
    assert described(path)["version"] == "0.1.0" != bc.__version__
    plan = bc.Plan.load(path)
    x = np.linspace(-2, 2, 240, dtype=np.float32).reshape(1, 3, 10, 8)
    np.testing.assert_allclose(plan(x), [OF_0_1_0[name]], atol=2e-6)


def test_a_plan_of_another_format_names_who_wrote_it(tmp_path: Path) -> None:
    bc.compile(little_network()).save(tmp_path / "plan")
    read = {**described(tmp_path / "plan"), "format": 99, "version": "7.1.0"}
    wanted = rf"blockconv 7\.1\.0 wrote format 99; {bc.__version__} reads 1"
    with pytest.raises(bc.ArgumentError, match=wanted):
        bc.Plan.load(written(tmp_path / "plan", json.dumps(read)))


@pytest.mark.parametrize("threads", [0, -2, 2.5, True, "2", None])
def test_threads_of_a_file_that_cannot_be(threads: Any, tmp_path: Path) -> None:
    bc.compile(little_network()).save(tmp_path / "plan")
    read = described(tmp_path / "plan")
    read["extra"]["options"]["threads"] = threads
    with pytest.raises(bc.ArgumentError, match=r"Plan\.load: path=.*threads"):
        bc.Plan.load(written(tmp_path / "plan", json.dumps(read)))
    read["extra"]["options"]["threads"] = 10**6  # saved on a machine that has more
    assert bc.Plan.load(written(tmp_path / "plan", json.dumps(read))).options.threads == bc.get_num_threads()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def test_a_plan_keeps_the_names_of_nodes_that_were_merged(tmp_path: Path) -> None:
    b = bc.NetworkBuilder("merged")
    x = b.conv2d(b.input("x", (1, 4, 6, 6)), values((4, 4, 3, 3)), name="conv")
    b.output(b.activation(b.affine(x, *values((2, 4)), name="norm"), "relu", name="relu"))
    bc.compile(b.build(), threads=1).save(tmp_path / "plan")
    plan = bc.Plan.load(tmp_path / "plan")
    assert [plan.network.holder(name) for name in ("norm", "relu")] == ["conv", "conv"]
    assert plan.with_layouts({"relu": "NHWC"}).actions[-1].kind == "reorder"


def test_a_plan_with_numbers_of_numpy(tmp_path: Path) -> None:
    b = bc.NetworkBuilder("NumPy")
    x = b.input("x", (1, 4, 6, 6))
    x = b.conv2d(b.concat(x, x, axis=np.int64(1)), values((4, 2, 3, 3)), groups=np.int64(4))
    b.output(b.max_pool2d(x, 3, 2, ceil_mode=np.bool_(True)))
    plan = bc.compile(b.build(), threads=1)
    plan.save(tmp_path / "plan")
    image = values((1, 4, 6, 6))
    np.testing.assert_array_equal(bc.Plan.load(tmp_path / "plan")(image), plan(image))


def test_a_plan_with_anything_anywhere(tmp_path: Path) -> None:
    """Each value of the description in turn is replaced by what does not belong there, deep nesting included."""
    bc.compile(little_network()).save(tmp_path / "plan")
    wrong = [None, True, -1, 0, 2.5, 2**40, 10**400, float("nan"), "", [], {}, [[1]], {"is": "Conv2d"}, "@"]
    for number, place in enumerate(places(described(tmp_path / "plan"))):
        read = described(tmp_path / "plan")
        at: Any = read
        for key in place[:-1]:
            at = at[key]
        if place:
            at[place[-1]] = wrong[number % len(wrong)]
        text = json.dumps(read if place else wrong[0])
        refused(written(tmp_path / "plan", text.replace('"@"', "[" * 100_000 + "]" * 100_000)))


@pytest.mark.parametrize("kind", ["plan", "array"])
def test_a_file_with_any_bit_flipped_or_cut_short(kind: str, tmp_path: Path) -> None:
    path, rng = tmp_path / "file", np.random.default_rng(0)
    if kind == "plan":
        bc.compile(little_network()).save(path)
    else:
        bc.to_layout(values((1, 5, 3, 3)), "NCHW4").save(path)
    whole = path.read_bytes()
    # Headers of the zip and its directory are where a bit matters most: data have checksums.
    spots = [*range(64), *range(len(whole) - 120, len(whole)), *rng.integers(0, len(whole), 100)]
    damaged = [whole[: rng.integers(len(whole))] for _ in range(40)]
    for spot in spots:
        flipped = bytearray(whole)
        flipped[spot] ^= 1 << int(rng.integers(8))
        damaged.append(bytes(flipped))
    for data in damaged:
        path.write_bytes(data)
        if kind == "plan":
            refused(path)
            continue
        with contextlib.suppress(bc.ArgumentError):
            bc.BlockedArray.load(path)


OF_BEFORE = [
    ({"is": "Pointwise", "kind": "where"}, ops.Where()),
    ({"is": "Pointwise", "kind": "less"}, ops.Binary("less")),
    ({"is": "Scan", "axis": 2, "kind": "mul", "total": True}, ops.Reduce((2,), True, "prod")),
    ({"is": "Scan", "axis": 2, "kind": "max", "total": False}, ops.Scan(2, "max")),
]


@pytest.mark.parametrize(("held", "made"), OF_BEFORE, ids=[repr(made) for _, made in OF_BEFORE])
def test_ops_of_earlier_files_load(held: dict[str, Any], made: ops.Op) -> None:
    assert archive._typed(ops.Op, held) == made
