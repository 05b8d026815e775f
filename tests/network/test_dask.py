"""Plans and convolutions on Dask arrays."""

from __future__ import annotations

import doctest
import os
from typing import Any

import numpy as np
import pytest
from small_networks import u_net, whole_numbers

import blockconv as bc

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


@pytest.mark.slow
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
        workers = {worker["pid"] for worker in client.run(lambda dask_worker: {"pid": os.getpid()}).values()}
        assert len(workers) == 2
        pending = client.compute(found[next(iter(found))])
        victim = next(iter(client.scheduler_info()["workers"]))
        client.run(os._exit, 1, workers=[victim], on_error="ignore", nanny=False, wait=False)
        np.testing.assert_array_equal(pending.result(), plan(x)[next(iter(found))])


def test_what_is_no_dask_array_is_refused(plan: bc.Plan) -> None:
    x = np.zeros((1, 3, 80, 80), np.float32)
    for bad in (x, da.from_array(x[0]), da.from_array(x.astype(np.float64))):
        with pytest.raises(bc.ArgumentError, match="map_plan"):
            blockconv.dask.map_plan(plan, bad)
    with pytest.raises(bc.ArgumentError, match=r"blockconv\.dask\.conv2d"):
        blockconv.dask.conv2d(x, np.ones((2, 3, 3, 3), np.float32))
    with pytest.raises(bc.ArgumentError, match=r"blockconv\.dask"):
        bc.conv2d(da.from_array(x), np.ones((2, 3, 3, 3), np.float32))


def test_the_example_of_help_says_what_it_says() -> None:
    found = doctest.testmod(blockconv.dask)
    assert found.attempted
    assert not found.failed
