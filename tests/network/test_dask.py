"""Plans and convolutions on Dask arrays."""

from __future__ import annotations

import doctest
import os
from typing import Any

import numpy as np
import pytest
from small_networks import u_net, whole_numbers

import blockconv as bc

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

import blockconv.dask  # noqa: E402


@pytest.fixture(scope="module")
def plan() -> bc.Plan:
    return bc.compile(u_net(np.random.default_rng(0)), threads=1, accuracy="strict")


@pytest.mark.parametrize("chunks", [(1, 3, 50, 70), (2, 3, 130, 200), (2, 1, 64, 64)])
def test_a_plan_on_chunks_gives_the_whole_images_results(plan: bc.Plan, chunks: tuple[int, ...]) -> None:
    x = whole_numbers(np.random.default_rng(1), 2, 3, 130, 200)
    found, wanted = blockconv.dask.map_plan(plan, da.from_array(x, chunks), tile=64), plan(x)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert (found[name].shape, found[name].dtype) == (wanted[name].shape, wanted[name].dtype)
        np.testing.assert_array_equal(found[name].compute(scheduler="threads"), wanted[name])


def test_each_chunk_is_computed_once(plan: bc.Plan) -> None:
    """Four tiles read most of them."""
    calls = []

    def chunk(block_info: Any = None) -> Any:
        calls.append(block_info[None]["chunk-location"])
        return np.ones((1, 3, 50, 50), np.float32)

    x = da.map_blocks(chunk, chunks=((1,), (3,), (50,) * 5, (50,) * 5), dtype=np.float32, meta=np.empty((0,) * 4, "f4"))
    calls.clear()
    found = blockconv.dask.map_plan(plan, x, tile=64)
    wanted = plan(np.ones((1, 3, 250, 250), np.float32))
    for name, result in dask.compute(found, scheduler="threads")[0].items():
        np.testing.assert_array_equal(result, wanted[name])
    assert sorted(calls) == sorted(set(calls))
    assert len(calls) == 25


def test_a_tile_is_few_tasks() -> None:
    b = bc.NetworkBuilder("one")
    b.output(b.conv2d(b.input("x", (1, 1, 64, 64)), np.ones((1, 1, 3, 3), np.float32), padding=1))
    plan = bc.compile(b.build(), threads=1)
    x = da.zeros((1, 1, 640, 640), dtype=np.float32, chunks=64)
    (found,) = dask.optimize(blockconv.dask.map_plan(plan, x, 64))
    tiles = len(plan.tiling(x.shape, 64).pieces)
    assert len(found.dask) <= 5 * tiles + x.npartitions + 1  # parts of up to four chunks, and the plan's call


def test_tiles_are_about_as_large_as_chunks(plan: bc.Plan) -> None:
    """A task of Dask costs more than many pixels do, but memory of a tile has an end."""
    for chunk, (low, high) in ((100, (400, 520)), (900, (750, 920)), (4000, (900, 1040))):
        lazy = blockconv.dask.map_plan(
            plan, da.zeros((1, 3, 4000, 4000), dtype=np.float32, chunks=(1, 3, chunk, chunk))
        )
        assert all(low <= sizes[1] <= high for sizes in lazy["conv2d_5"].chunks[2:])


def test_zarr_is_read_and_written_by_chunks(plan: bc.Plan, tmp_path: Any) -> None:
    zarr = pytest.importorskip("zarr")
    x = whole_numbers(np.random.default_rng(1), 1, 3, 130, 200)
    image = zarr.open(str(tmp_path / "x.zarr"), mode="w", shape=x.shape, chunks=(1, 3, 50, 70), dtype="float32")
    image[:] = x
    for name, found in blockconv.dask.map_plan(plan, da.from_zarr(image), tile=64).items():
        chunks = (1, found.shape[1], 32, 48)
        out = zarr.open(str(tmp_path / name), mode="w", shape=found.shape, chunks=chunks, dtype="float32")
        da.store(found.rechunk(chunks), out, lock=False)
        np.testing.assert_array_equal(zarr.open(str(tmp_path / name), mode="r")[:], plan(x)[name])


def test_floats_have_the_bits_of_tiles_whoever_computes_them() -> None:
    rng = np.random.default_rng(5)
    plan = bc.compile(u_net(rng), threads=1)
    x = rng.standard_normal((1, 3, 150, 170)).astype(np.float32)
    wanted = plan.tiled(x, 64)
    for scheduler, chunks in (("synchronous", (1, 3, 64, 64)), ("threads", (1, 1, 150, 30))):
        found = blockconv.dask.map_plan(plan, da.from_array(x, chunks), tile=64)
        for name, array in dask.compute(found, scheduler=scheduler)[0].items():
            assert array.tobytes() == wanted[name].tobytes()


def test_functions_have_the_results_of_those_on_arrays() -> None:
    rng = np.random.default_rng(2)
    x, weight, bias = whole_numbers(rng, 1, 4, 150, 90), whole_numbers(rng, 6, 2, 3, 5), whole_numbers(rng, 6)
    lazy, options = da.from_array(x, (1, 4, 64, 64)), {"stride": (2, 1), "padding": 2, "groups": 2, "dilation": 2}
    found = blockconv.dask.conv2d(lazy, weight, bias, activation="relu", tile=48, **options)
    np.testing.assert_array_equal(found.compute(), bc.conv2d(x, weight, bias, activation="relu", **options))
    np.testing.assert_array_equal(
        blockconv.dask.max_pool2d(lazy, 3, 2, 1, tile=48).compute(), bc.max_pool2d(x, 3, 2, 1)
    )
    found = blockconv.dask.avg_pool2d(lazy, 3, 1, 1, count_include_pad=False, tile=48)
    np.testing.assert_allclose(found.compute(), bc.avg_pool2d(x, 3, 1, 1, count_include_pad=False), rtol=1e-6)
    most, mean = (3, (), (1, 0), 2, True), ((2, 3), 2, ((1, 0), (0, 1)), True, True, -5)
    np.testing.assert_array_equal(blockconv.dask.max_pool2d(lazy, *most, tile=48).compute(), bc.max_pool2d(x, *most))
    found = blockconv.dask.avg_pool2d(lazy, *mean, tile=48).compute()
    np.testing.assert_allclose(found, bc.avg_pool2d(x, *mean), rtol=1e-6)
    for call in (blockconv.dask.max_pool2d, blockconv.dask.avg_pool2d):
        for padding in (2, (1, 2), "valid", -1, 1.0, None):
            with pytest.raises(bc.ArgumentError, match=r"_pool2d: padding="):
                call(lazy, 3, padding=padding)


@pytest.mark.nightly
def test_an_array_of_more_than_two_billion_elements() -> None:
    """Generated chunk by chunk, reduced chunk by chunk: 8.8 GB of float32 that are never there at once."""
    b, side = bc.NetworkBuilder("sum"), 47_000
    b.output(b.conv2d(b.input("x", (1, 1, 1024, 1024)), np.ones((1, 1, 3, 3), np.float32), padding=1))
    plan = bc.compile(b.build(), threads=1)
    x = da.ones((1, 1, side, side), dtype=np.float32, chunks=4096)
    assert x.size > 2**31
    found = blockconv.dask.map_plan(plan, x, 4096)
    assert found.shape == x.shape
    total, least = dask.compute(found.sum(dtype=np.float64), found.min(), scheduler="threads", num_workers=2)
    assert (total, least) == ((3 * side - 2) ** 2, 4)


@pytest.mark.nightly
def test_processes_bind_a_plan_once_and_a_worker_that_ends_loses_nothing(plan: bc.Plan, tmp_path: Any) -> None:
    """Two workers with a nanny; the first call ends its process, and its tiles run again."""
    distributed = pytest.importorskip("distributed")
    x = whole_numbers(np.random.default_rng(1), 1, 3, 300, 300)
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        lazy = da.from_array(x, (1, 3, 100, 100))
        found = blockconv.dask.map_plan(plan, lazy, tile=64)
        for name, wanted in plan(x).items():
            np.testing.assert_array_equal(found[name].compute(), wanted)
        assert set(client.run(bc.get_num_threads).values()) == {1}, "as Dask's nanny says by OMP_NUM_THREADS"
        workers = client.run(os.getpid)
        assert len(set(workers.values())) == 2
        pending = client.compute(found[next(iter(found))])
        victim = next(iter(workers))
        client.run(os._exit, 1, workers=[victim], on_error="ignore", nanny=False, wait=False)
        np.testing.assert_array_equal(pending.result(), plan(x)[next(iter(found))])


def test_what_is_no_dask_array_is_refused(plan: bc.Plan) -> None:
    x = np.zeros((1, 3, 80, 80), np.float32)
    for bad, remedy in (
        (x, r"give dask\.array\.from_array\(array\)"),
        (da.from_array(x[0]), r"\(C, H, W\) needs array\[None\], \(H, W, C\) array\[None\]\.transpose"),
        (da.from_array(x.astype(np.float64)), r"give array\.astype\('float3"),
        (da.from_array(x.transpose(0, 2, 3, 1)), r"give dask.array.from_array\(image\)\.transpose\(0, 3, 1, 2\)"),
    ):
        with pytest.raises(bc.ArgumentError, match=f"(map_plan: array|tiled: shape)=.*; {remedy}"):
            blockconv.dask.map_plan(plan, bad)
    unknown = da.from_array(x, chunks=(1, 3, 40, 40))
    unknown = unknown[:, :, unknown[0, 0, :, 0] >= 0]
    for array, says in ((unknown, "compute_chunk_sizes"), (da.from_array(np.ma.masked_less(x, 1)), "masked array")):
        with pytest.raises(bc.ArgumentError, match=f"map_plan: array=.*{says}"):
            blockconv.dask.map_plan(plan, array)
    with pytest.raises(bc.ArgumentError, match=r"map_plan: plan=.x.: has to be a Plan"):
        blockconv.dask.map_plan("x", da.ones((1, 3, 8, 8)))
    with pytest.raises(bc.ArgumentError, match=r"blockconv\.dask\.conv2d"):
        blockconv.dask.conv2d(x, np.ones((2, 3, 3, 3), np.float32))
    with pytest.raises(bc.ArgumentError, match=r"blockconv\.dask"):
        bc.conv2d(da.from_array(x), np.ones((2, 3, 3, 3), np.float32))


def test_the_example_of_help_says_what_it_says() -> None:
    found = doctest.testmod(blockconv.dask)
    assert found.attempted
    assert not found.failed
