"""Machine profiles: which one counts, what a file of one may be, what costs and tiles make of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from machines import MACHINES, stand_in

from blockconv.core import target
from blockconv.core.errors import ArgumentError
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import INT8, Types
from blockconv.dispatch import measuring, turns
from blockconv.dispatch.selection import named
from blockconv.kernels.common.dot import DOTS, dot_for, name_of, tiles_of, tiles_of_registers
from blockconv.kernels.common.request import Request
from blockconv.kernels.conv import blocking as cut
from blockconv.kernels.conv.blocking import TileShape
from blockconv.machine import profile as profiles
from blockconv.machine.machine import host
from blockconv.machine.profile import TileTimes, committed, median_of, profile, read

NHWC = Layout("NHWC")


@pytest.mark.parametrize("known", committed(), ids=lambda known: known.name)
def test_committed_profiles_are_whole(known: profiles.MachineProfile) -> None:
    """Every rate is there, and is a time; the fastest tile is among those of the instruction set."""
    assert profiles.find(known.name) is known
    assert known.name.endswith(known.isa)
    times = [*(at.step for at in known.tiles), *known.copies.values(), known.launch]
    times += known.rates.tile, known.rates.latency
    assert min(*times, *known.packs.values(), *known.spread.values()) > 0
    assert min(seconds for each in known.transforms.values() for seconds in each) > 0
    assert all(product > 0 <= output for product, output in known.depthwise.values())
    assert set(known.copies) == {"L2", "L3", "memory"} <= {*known.caches, "memory"}
    assert known.record["cpu"]
    assert known.record["date"]
    with stand_in(next(at for at in MACHINES.values() if at.isa.name == known.isa)):
        assert {(at.vectors, at.pixels) for at in known.tiles} >= set(
            tiles_of_registers(target.isa(), target.isa().fma)
        )
        for vectors, pixels in tiles_of_registers(target.isa(), target.isa().fma):
            assert known.rates.step(pixels, vectors) == pytest.approx(
                next(at.step for at in known.tiles if (at.pixels, at.vectors) == (pixels, vectors)), rel=0.02
            )
        for name, tiles in known.dots.items():
            if name in DOTS:
                assert {(at.vectors, at.pixels) for at in tiles} >= set(tiles_of(DOTS[name], target.isa()))
            for at in tiles[:-1]:  # but the narrow one
                assert known.by(name).step(at.pixels, at.vectors) == pytest.approx(at.step, rel=0.02)


@pytest.mark.parametrize("on_machine", MACHINES, indirect=True)
def test_a_machine_without_a_profile_takes_the_nearest(on_machine: str) -> None:
    """Of another instruction set's, one with the same tiles: fused multiply-adds and as many registers."""
    isa, known = target.isa(), profile()
    assert known.isa == ("avx512" if isa.name == "neon" else isa.name)
    assert (known.registers, known.isa != "sse") == (isa.registers, isa.fma)


@pytest.mark.parametrize("known", committed(), ids=lambda known: known.name)
def test_a_machine_takes_its_own_profile(known: profiles.MachineProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Numba holds it to a lesser instruction set too, which all machines then have the same name for."""
    monkeypatch.setattr(profiles.identity, "describe", lambda: {"cpu": known.record["cpu"], "isa": known.isa})
    facts = known.isa, known.vector_bytes, known.registers, known.halves, known.cpu, known.caches["L2"]
    assert profiles._selected.__wrapped__("", *facts).profile == known


@pytest.mark.parametrize("known", committed(), ids=lambda known: known.name)
def test_a_tile_that_was_not_measured_has_a_price(known: profiles.MachineProfile) -> None:
    """A machine of more registers than the nearest profile's has tiles that the profile does not know."""
    for rates in (known.rates, *(known.by(name) for name in known.dots if "one step" not in name)):
        assert rates.step(5, 9) > rates.step(5, 4) > 0


def test_an_environment_variable_names_a_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for known in committed():
        monkeypatch.setenv(profiles.VARIABLE, known.name)
        assert profile() == known
    path = tmp_path / "mine.json"
    path.write_text(dataclasses.replace(committed()[0], name="mine").to_json())
    monkeypatch.setenv(profiles.VARIABLE, str(path))
    assert profile().name == "mine"
    assert profile().tiles == committed()[0].tiles


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**json.loads(committed()[0].to_json()), "pools": {"pool_tiles max": [1e-8] * 4}}))
    assert read(path) == committed()[0]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 9}', '{"format": 1, "name": "x"}'])
def test_what_is_no_profile_is_refused(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=f"{re.escape(str(path))}.*is no machine profile .*blockconv tune"):
        read(path)


def test_tiles_follow_the_profile() -> None:
    """The tile whose step is said to take the least is taken: of each number of vectors, once."""
    problem, known = Conv2dProblem(1, 64, 12, 84, 96, 1, 1), profile()
    for vectors, pixels in tiles_of_registers(target.isa(), target.isa().fma):
        fast = [at._replace(step=at.step / 8) if at.vectors == vectors else at for at in known.tiles]
        faster = dataclasses.replace(known, tiles=tuple(at for at in fast if at.pixels > 2))
        machine = dataclasses.replace(host(), profile=faster)
        at = cut.blocking(Request(problem, NHWC, NHWC, Types.all("float32"), machine=machine))
        assert at.vectors == vectors
        assert at.rows * at.pixels <= pixels


def test_a_tile_can_be_asked_for() -> None:
    problem = Conv2dProblem(1, 64, 12, 84, 96, 1, 1)
    for vectors, pixels in tiles_of_registers(target.isa(), target.isa().fma):
        tile = TileShape(1, pixels, vectors)
        at = named("conv2d", "conv_direct").prepare(problem, NHWC, NHWC, Types.all("float32"), tile=tile).blocking
        assert at.shape == tile


# ---------------------------------------------------------------- measuring


def test_of_several_profiles_each_time_is_the_median() -> None:
    """Each by itself: no run is taken whole."""
    known = committed()[0]
    slow = dataclasses.replace(known, launch=3 * known.launch, stores={**known.stores, "1": 0.0})
    fast = dataclasses.replace(known, launch=known.launch / 3, tiles=tuple(at._replace(tile=9.0) for at in known.tiles))
    found = median_of([slow, fast, known])
    assert found == dataclasses.replace(known, record={**known.record, "runs": 3})
    assert median_of([slow, slow, fast]).launch == slow.launch
    assert median_of([slow, fast]).launch == fast.launch


@pytest.mark.slow
def test_a_profile_is_measured_and_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few rounds, and any spread: of the figures only that they are times is looked at."""
    few = {"ROUNDS": 2, "LEAST": 0.0, "WARM": 0.0, "PAUSE": 0.0, "MOST_SPREAD": 1e9, "MOST_SLOWED": 1e9}
    for name, value in few.items():
        monkeypatch.setattr(turns, name, value)
    monkeypatch.setattr(measuring, "positive", lambda name, measured, times: measured())
    # Few of what compiles for long.
    monkeypatch.setattr(measuring, "_transforms", lambda form, layout, fma: (1e-8, 1e-8))
    monkeypatch.setattr(measuring, "_winograd_spread", lambda: 1e-10)
    monkeypatch.setattr(measuring, "_depthwise", lambda: {"channels": [1e-10, 0.0]})
    monkeypatch.setattr(measuring, "tiles_of", lambda dot, isa: ((1, 3),))
    monkeypatch.setattr(measuring, "_PACKED", {"16": measuring._PACKED["16"], "4 cut": measuring._PACKED["4 cut"]})
    found = measuring.measure(runs=2)
    path = tmp_path / "profile.json"
    path.write_text(found.to_json())
    assert json.loads(path.read_text())["record"]["isa"] == target.isa().name
    again = read(path)
    assert again.tiles == found.tiles
    assert again.dots == found.dots
    known = {name_of(dot_for(types, target.isa())) for types in (*INT8, Types.converted("bfloat16", "bfloat16"))} - {""}
    matrices = {"tdpbusd", "tdpbf16ps"} if target.isa().amx else set()
    assert set(found.dots) == known | matrices | {f"{name}, one step" for name in matrices}
    for name, tiles in {"": again.tiles, **again.dots}.items():
        assert all(isinstance(at, TileTimes) for at in tiles)
        # Differences of two times: of so few rounds they may be anything but no numbers.
        assert all(math.isfinite(figure) for at in tiles for figure in (at.step, at.tile)), name
    assert dataclasses.asdict(again) == json.loads(json.dumps(dataclasses.asdict(found), default=list)) | {
        "tiles": again.tiles,
        "dots": again.dots,
    }


def test_a_disturbed_machine_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROUNDS": 3, "LEAST": 0.0, "WARM": 0.0, "MOST_SPREAD": -1.0, "PAUSE": 0.0}.items():
        monkeypatch.setattr(turns, name, value)
    runs: dict[Any, Any] = {"nothing": lambda: None}
    with pytest.raises(turns.UnsteadyError, match=r"samples of \['nothing'\] differed .*; (process \d+|no process)"):
        turns.in_turns(runs)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no file that says it")
def test_the_process_that_disturbs_is_named() -> None:
    """By its number and name, whatever is in the name; of none that is busy, where else to look."""
    program = "import sys, time; open('/proc/self/comm', 'w').write('a) (b 1 2'); time.sleep(0.1)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program]) as busy:
        try:
            before, begin = turns._used(), time.perf_counter()
            while not any(name.startswith(f"{busy.pid} (a)") for name in turns._used()):
                time.sleep(0.01)
            time.sleep(0.5)
            now = turns._used()
            assert f"{os.getpid()} (" not in " ".join(now)
            assert now[f"{busy.pid} (a) (b 1 2)"] > 0
            others = {name: seconds for name, seconds in now.items() if not name.startswith(f"{busy.pid} ")}
            told = turns._remedy({**others, **before}, 1e-9)
            assert re.search(r"process \d+ \(.*\) kept \d+% of a processor busy: end it, or stop it", told)
        finally:
            busy.kill()
    assert "no process here was busy" in turns._remedy(dict.fromkeys(turns._used(), 1e9), time.perf_counter() - begin)


@pytest.mark.parametrize(("unsteady", "raises"), [(0, False), (2, False), (3, True)])
@pytest.mark.sampled(3)
def test_a_run_that_was_disturbed_is_measured_again(
    unsteady: int, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as fewer were than are to be measured."""
    left, known = [unsteady], committed()[0]

    def measured(shapes: object) -> profiles.MachineProfile:
        left[0] -= 1
        if left[0] >= 0:
            raise turns.UnsteadyError("disturbed")
        return known

    monkeypatch.setattr(measuring, "_profile", measured)
    monkeypatch.setattr(measuring, "_multiply_adds", lambda shape: lambda: None)
    if raises:
        with pytest.raises(turns.UnsteadyError, match="disturbed"):
            measuring.measure(runs=3)
        return
    found = measuring.measure(runs=3)
    assert found == dataclasses.replace(known, record={**known.record, "runs": 3, "discarded": unsteady})


def test_times_are_those_of_the_clock_at_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has become slower is so at its clock's work too; by a half, it is disturbed."""
    slow = 1.0
    monkeypatch.setattr(turns, "PAUSE", 0.0)
    monkeypatch.setattr(turns, "_repeats", lambda run: 1)
    monkeypatch.setattr(turns, "_samples", lambda runs, _: {name: [slow * run()] * 5 for name, run in runs.items()})
    runs: dict[Any, Any] = {"a": lambda: 3.0}
    with turns.against(lambda: 5.0):  # type: ignore[arg-type]
        assert turns.in_turns(runs) == {"a": 3.0}
        slow = 1.125
        assert turns.in_turns(runs) == {"a": 3.0}
        slow = 1.5
        with pytest.raises(turns.UnsteadyError, match="samples of"):
            turns.in_turns(runs)
    assert turns.in_turns(runs) == {"a": 4.5}


def test_a_time_that_came_out_as_nothing_is_measured_again() -> None:
    found = iter([[1.0, 0.0], [0.0, 2.0], [1.0, 2.0], [3.0, 3.0]])
    assert turns.positive("two times", lambda: next(found), iter) == [1.0, 2.0]
    with pytest.raises(turns.UnsteadyError, match="tune: a time was measured as 0 s in each of 16 attempts"):
        turns.positive("a time", lambda: 0.0, lambda time: [time])


def test_packing_that_came_out_as_the_least_possible_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([{"task": 1e-9, "row": 2e-9}, {"task": 2e-9, "row": 1e-9}, {"task": 2e-9, "row": 3e-9}])
    monkeypatch.setattr(measuring, "_packs", lambda fma: next(found))
    assert measuring._steady_packs(1e-9) == {"task": 2e-9, "row": 3e-9}


def test_rates_are_found_from_sums() -> None:
    """Exactly, where there is an exact answer; never less than nothing, where the nearest is."""
    counts = [(1, 2, 3), (4, 0, 1), (2, 2, 0), (1, 1, 1)]
    wanted = 3e-9, 5e-9, 1e-9
    seconds = [sum(n * each for n, each in zip(of, wanted, strict=True)) for of in counts]
    assert turns.rates(counts, seconds) == pytest.approx(wanted)
    found = turns.rates([(1, 0), (2, 1), (3, 3)], [1.0, 1.9, 2.5])
    assert found[1] == 0
    assert 0.8 < found[0] < 1.0


@pytest.mark.parametrize("known", committed(), ids=lambda known: known.name)
def test_what_was_not_measured_is_priced_as_the_nearest(known: profiles.MachineProfile) -> None:
    assert known.pack(8, "") == known.packs["8"]
    assert known.pack(24, "apart") == known.packs["16 apart"]
    assert known.pack(1, "cut") == known.packs["4 cut"]
    whole = tuple(known.transforms["4x4 stride 1"])
    assert known.transform(4, 1, 0, rows=False) == whole
    assert known.transform(4, 1, 0, rows=True) == tuple(known.transforms["4x4 stride 1 in rows"])
    assert known.transform(4, 1, 1, rows=True) == tuple(known.transforms["4x4 stride 1 of 1"])


def test_bytes_that_leave_a_cache_cost_more() -> None:
    """A byte takes longer the more there are; none of it suddenly."""
    known = profile()
    sizes = [known.caches["L2"] * k / 8 for k in range(1, 400)]
    each = [known.move(size / 2, size / 2) / size for size in sizes]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(each))
    assert max(b / a for a, b in itertools.pairwise(each)) < (known.copies["L2"] / known.copies["L3"]) ** 0.25
    assert each[0] == pytest.approx(1 / known.copies["L2"])
