"""PyTorch's processes and threads beside ours: loaders that fork, threads that call, DDP, kernels on disk."""

from __future__ import annotations

import concurrent.futures
import copy
import importlib.util
import re
import threading

import pytest
from torch_models import NETWORKS, made, torch

import blockconv as bc

needs_tbb = pytest.mark.skipif(importlib.util.find_spec("numba.np.ufunc.tbbpool") is None, reason="no TBB here")

LOADING = """
import faulthandler, sys, warnings
import torch
from torch import nn
import blockconv as bc
import blockconv.torch

warnings.simplefilter("ignore", bc.SlowPathWarning)  # forked workers have none of our threads
way, steps, epochs = sys.argv[1], int(sys.argv[2]), 3
SMOOTH = torch.full((3, 1, 3, 3), 1 / 9)

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * steps // epochs

    def __getitem__(self, k):
        image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(k))
        return bc.conv2d(image, SMOOTH, padding=1, groups=3), k % 2

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 2)
)
call = torch.compile(model, backend=bc.torch.backend) if way == "compile" else bc.torch.convert(model)
optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
for _ in range(epochs):  # each forks its workers beside the threads of the steps before
    loader = torch.utils.data.DataLoader(Images(), 4, num_workers=4, multiprocessing_context="fork")
    for images, labels in loader:
        faulthandler.dump_traceback_later(200, exit=True)  # a step that never ends
        loss = nn.functional.cross_entropy(call(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print(bc.get_threading(), len(losses), sum(map(torch.isfinite, torch.tensor(losses))).item())
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("pool", "way", "steps"),
    [
        pytest.param("auto", "compile", 12, marks=pytest.mark.slow),
        pytest.param("tbb", "convert", 12, marks=[pytest.mark.nightly, needs_tbb]),
        pytest.param("auto", "compile", 1002, marks=pytest.mark.nightly),
        pytest.param("tbb", "compile", 1002, marks=[pytest.mark.nightly, needs_tbb]),
    ],
)
def test_a_loader_with_four_workers_feeds_steps_without_a_deadlock(pool, way, steps, tmp_path, run_python):
    script = tmp_path / "load.py"
    script.write_text(LOADING)
    found = run_python([str(script), way, str(steps)], timeout=3600, BLOCKCONV_THREADING=pool).stdout.split()
    assert found == ["openmp" if pool == "auto" else pool, str(steps), str(steps)]


@pytest.mark.slow
def test_threads_call_one_compiled_model():
    """Eight, from the first call on, with three sizes; then the weights change."""
    torch._dynamo.reset()
    model = made(NETWORKS["resnet"])
    fast = torch.compile(model, backend=bc.torch.backend, dynamic=True, options={"threads": 2})
    sizes = [torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(n)) for n in (2, 3, 4)]
    for scale in (1.0, 1.5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
            wanted = [model(x) for x in sizes]
        together = threading.Barrier(8)

        def call(k, wanted=wanted, together=together):
            together.wait()
            with torch.no_grad():
                return [((fast(sizes[i % 3]) - wanted[i % 3]).abs().max() / wanted[i % 3].abs().max()).item()
                        for i in range(k, k + 4)]  # fmt: skip

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert max(max(errors) for errors in pool.map(call, range(8))) < 1e-5
    torch._dynamo.reset()


def test_a_backward_graph_waits_until_nobody_traces(monkeypatch):
    """Who traces marks all nodes that the process makes, and Dynamo's lock is held meanwhile."""
    from torch._dynamo.convert_frame import compile_lock

    from blockconv.frontends.torch import backend

    torch._dynamo.reset()
    model = torch.nn.Conv2d(3, 8, 3)
    y = torch.compile(model, backend=bc.torch.backend)(torch.randn(1, 3, 9, 9)).sum()
    begun, planned = threading.Event(), backend._planned
    monkeypatch.setattr(backend, "_planned", lambda *given: (begun.set(), planned(*given))[1])
    thread = threading.Thread(target=y.backward)
    with compile_lock:
        thread.start()
        assert not begun.wait(1)
    thread.join(60)
    assert begun.is_set()
    assert model.weight.grad is not None


def test_threads_train_one_model():
    """Each thread finds its own gradients, some while others compile."""
    torch._dynamo.reset()
    model = made(NETWORKS["unet"]).train()
    own = bc.torch.convert(copy.deepcopy(model))
    calls = (torch.compile(model, backend=bc.torch.backend), own)
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def gradients(call, parameters):
        return torch.autograd.grad(call(x).square().sum(), list(parameters))

    wanted = gradients(model, model.parameters())

    def work(k):
        return [gradients(calls[k % 2], (model, own)[k % 2].parameters()) for _ in range(4)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for found in (each for many in pool.map(work, range(8)) for each in many):
            for a, b in zip(found, wanted, strict=True):
                assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    torch._dynamo.reset()


TRAINING = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import blockconv as bc
import blockconv.torch

way, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if size > 1:
    dist.init_process_group("gloo", init_method="file://" + sys.argv[4], rank=rank, world_size=size)
torch.manual_seed(0)
own = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 1, 3))
own = bc.torch.convert(own) if way == "convert" else own
model = nn.parallel.DistributedDataParallel(own) if size > 1 else own
call = torch.compile(model, backend=bc.torch.backend) if way == "compile" else model
optimizer = torch.optim.SGD(own.parameters(), 0.05)
data = torch.randn(64, 3, 10, 10, generator=torch.Generator().manual_seed(1))
for batch in data.split(8):
    part = batch[rank * 8 // size : (rank + 1) * 8 // size]
    loss = (call(part) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
loss = loss.detach().clone()
if size > 1:
    dist.all_reduce(loss)
    dist.destroy_process_group()
print(loss.item() / size)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["convert", "compile"])
def test_two_processes_train_as_one(way, tmp_path, run_python):
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    alone = float(run_python([str(script), way, "0", "1"]).stdout)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(run_python, [str(script), way, str(k), "2", str(tmp_path / "meet")]) for k in range(2)]
        found = [float(run.result().stdout) for run in runs]
    assert found == pytest.approx([alone, alone], rel=1e-5)


KEPT = """
import gc, warnings
import blockconv as bc
import blockconv.torch
from blockconv.jit.families import Kernel
import torch

warnings.simplefilter("ignore", bc.SlowPathWarning)
model, x = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.MaxPool2d(2)), torch.randn(2, 3, 10, 10)
fast = torch.compile(lambda x: model(x).logcumsumexp(1), backend=bc.torch.backend)
with torch.no_grad():
    fast(x)
fast(x).sum().backward()
kernels = [each for each in gc.get_objects() if type(each) is Kernel]
print(len(kernels), sum(kernel.compiled for kernel in kernels))
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path, run_python):
    """Inference, forward and backward of a model whose kernels the first process left on disk.

    The second one logs what became of each graph, as PyTorch's variable asks.
    """
    cache, counts = tmp_path / "cache", []
    for logs in (None, "blockconv.torch"):
        before = {*cache.rglob("*")}
        done = run_python(KEPT, BLOCKCONV_CACHE_DIR=str(cache), TORCH_LOGS=logs)
        kernels, compiled = map(int, done.stdout.split())
        counts.append((kernels, compiled, len({*cache.rglob("*")} - before)))
        said = re.findall(r"graph \S+, (\w+): \d+ of \d+ ops", done.stderr)
        assert said == ([] if logs is None else ["inference", "forward", "backward"])
        assert ("in PyTorch: aten.logcumsumexp: 1 node" in done.stderr) is (logs is not None)
    (kernels, _, new), (again, compiled, more) = counts
    assert kernels == again >= 5 <= new
    assert (compiled, more) == (0, 0)


UNINSTALLED = """
import importlib.metadata as metadata
found, entries = metadata.distribution, metadata.entry_points

def distribution(name):
    if name == "blockconv":
        raise metadata.PackageNotFoundError(name)
    return found(name)

metadata.distribution = distribution
metadata.entry_points = lambda **how: metadata.EntryPoints(e for e in entries(**how) if e.name != "blockconv")
import torch, blockconv.torch
model, x = torch.nn.Conv2d(3, 4, 3), torch.ones(1, 3, 6, 6)
assert torch.allclose(torch.compile(model, backend="blockconv")(x), model(x), atol=1e-5)
assert blockconv.torch.report(model)
"""


@pytest.mark.nightly
def test_the_back_end_has_its_name_in_a_source_tree_that_is_not_installed(run_python):
    run_python(UNINSTALLED)
