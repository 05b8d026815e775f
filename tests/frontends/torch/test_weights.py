"""Writes to weights that count no version, in compiled graphs and in converted modules: a row is a way to write."""

from __future__ import annotations

import copy
import ctypes
import datetime
import subprocess
import sys
import threading

import pytest
from torch_models import made, nn, torch

import blockconv as bc

dist = torch.distributed
needs_gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="no gloo here")


def images(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found, wanted, bound=1e-4):
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert (found - wanted).abs().max() <= bound * wanted.abs().max()


# ---------------------------------------------------------------- ways to write


def by_data(weight, new):
    weight.data.copy_(new)


def by_numpy(weight, new):
    weight.detach().numpy()[...] = new.numpy()


def by_dlpack(weight, new):
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach())).copy_(new)


def by_storage(weight, new):
    weight.untyped_storage().copy_(new.untyped_storage())


def by_address(weight, new):
    ctypes.memmove(weight.data_ptr(), new.data_ptr(), new.nbytes)


def by_another_mapping(weight, new):
    """The file that holds the weight, as another process writes it."""
    torch.from_file(weight.file, shared=True, size=new.numel()).copy_(new.flatten())


def by_two_ranks(change):
    """change(group, rank, weight, new), where this process is rank 0, and a thread is rank 1 with the new values."""

    def write(weight, new):
        store, errors = dist.HashStore(), []

        def run(rank, tensor):
            try:
                group = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=60))
                work = change(group, rank, tensor, new)
                if work is not None:
                    work.wait()
            except BaseException as error:
                errors.append(error)

        other = threading.Thread(target=run, args=(1, new.clone()))
        other.start()
        run(0, weight.detach())
        other.join()
        assert not errors, errors

    return write


def options(kind, **values):
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def zeros(like):
    return torch.zeros_like(like)


# How a weight of rank 0 becomes what rank 1 has. A sum with zeros keeps the values that rank 1 has.
COLLECTIVES = {
    "broadcast": lambda g, rank, x, new: g.broadcast([x], options(dist.BroadcastOptions, rootRank=1)),
    "recv": lambda g, rank, x, new: g.send([x], 0, 0) if rank else g.recv([x], 1, 0),
    "recv of anyone": lambda g, rank, x, new: g.send([x], 0, 0) if rank else g.recv_anysource([x], 0),
    "scatter": lambda g, rank, x, new: g.scatter(
        [x.clone() if rank else x], [[new.clone(), new]] if rank else [], options(dist.ScatterOptions, rootRank=1)
    ),
    "reduce": lambda g, rank, x, new: g.reduce([x], options(dist.ReduceOptions, rootRank=0)),
    "all_reduce": lambda g, rank, x, new: g.allreduce([x]),
    "all_reduce, coalesced": lambda g, rank, x, new: g.allreduce_coalesced([x]),
    "all_gather": lambda g, rank, x, new: g.allgather([[zeros(new), zeros(new) if rank else x]], [new.clone()]),
    "gather": lambda g, rank, x, new: g.gather(
        [] if rank else [[zeros(new), x]], [new.clone()], options(dist.GatherOptions, rootRank=0)
    ),
    "reduce_scatter": lambda g, rank, x, new: g.reduce_scatter([zeros(new) if rank else x], [[new, new]]),
    "all_to_all": lambda g, rank, x, new: g.alltoall([zeros(new), zeros(new) if rank else x], [new, new]),
}
WAYS = {
    **{way.__name__: way for way in (by_data, by_numpy, by_dlpack, by_storage, by_address, by_another_mapping)},
    **{f"gloo's {name}": pytest.param(by_two_ranks(change), marks=needs_gloo) for name, change in COLLECTIVES.items()},
}
ROUTES = {
    "compile": lambda model: torch.compile(model, backend=bc.torch.backend),
    "convert": bc.torch.convert,
}


def table(rows):
    return [row if isinstance(row, type(pytest.param())) else pytest.param(row) for row in rows.values()]


@pytest.fixture(scope="module", params=ROUTES)
def shared(request, tmp_path_factory):
    """A convolution whose weight is in a file, and its call on a route."""
    file = str(tmp_path_factory.mktemp("weights") / "weight")
    theirs = nn.Conv2d(3, 8, 3, bias=False)
    theirs.weight = nn.Parameter(torch.from_file(file, shared=True, size=8 * 27).view(8, 3, 3, 3))
    theirs.weight.file = file
    torch._dynamo.reset()
    yield theirs.weight, ROUTES[request.param](theirs)
    torch._dynamo.reset()


@pytest.mark.parametrize("write", table(WAYS), ids=list(WAYS))
def test_a_write_without_a_version_is_seen_at_the_next_call(write, shared):
    (weight, call), x = shared, images(2, 3, 9, 9)
    with torch.no_grad():
        weight.copy_(images(8, 3, 3, 3))
        for seed in range(1, 4):
            call(x)
            write(weight, images(8, 3, 3, 3, seed=seed))
            close(call(x), nn.functional.conv2d(x, weight))


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("route", ROUTES)
def test_a_write_to_any_tensor_of_a_model_is_seen(route, order):
    """Weights in any memory order, biases, and what a batch norm has."""
    theirs = made(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3))).to(
        memory_format=order
    )
    model, x = copy.deepcopy(theirs), images(1, 3, 9, 9)
    torch._dynamo.reset()
    call = ROUTES[route](model)
    with torch.no_grad():
        call(x)
        for own, other in zip(model.state_dict().values(), theirs.state_dict().values(), strict=True):
            if own.dim():
                for tensor in (own, other):
                    tensor.data.mul_(1.25).add_(0.03)
                close(call(x), theirs(x))
    torch._dynamo.reset()


@pytest.mark.parametrize("route", ROUTES)
def test_what_no_line_sees_needs_a_refresh(route):
    theirs, x = nn.Sequential(nn.Conv2d(64, 256, 3, bias=False)), images(1, 64, 4, 4)  # each ninth line has a hash
    torch._dynamo.reset()
    call = ROUTES[route](theirs)
    with torch.no_grad():
        before = call(x)
        theirs[0].weight.data.view(-1)[20] += 100
        assert call(x).equal(before)
        bc.torch.refresh(theirs)
        close(call(x), nn.functional.conv2d(x, theirs[0].weight))
    torch._dynamo.reset()


@pytest.mark.parametrize("route", ROUTES)
def test_inference_tensors_have_no_version(route):
    with torch.inference_mode():
        theirs, x = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False)), images(2, 3, 9, 9)
        torch._dynamo.reset()
        call = ROUTES[route](theirs)
        for k in range(3):
            close(call(x), nn.functional.conv2d(x, theirs[0].weight))
            theirs[0].weight.mul_(k + 2)
    torch._dynamo.reset()


@pytest.mark.parametrize("route", ROUTES)
def test_a_write_of_one_element_is_seen_in_time(route):
    theirs, x = nn.Sequential(nn.Conv2d(3, 64, 3, bias=False)), images(1, 3, 4, 4)  # 108 lines, four of them a call
    torch._dynamo.reset()
    call = ROUTES[route](theirs)
    with torch.no_grad():
        call(x)
        theirs[0].weight.data[17, 1, 2, 0] += 100
        for _ in range(27):
            found = call(x)
        close(found, nn.functional.conv2d(x, theirs[0].weight))
    torch._dynamo.reset()


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("route", ROUTES)
def test_weights_whose_memory_is_freed_between_calls(route, trains):
    """As FSDP and fully_shard free it: weights are parts of one storage, which is resized."""
    theirs = made(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2), nn.GroupNorm(2, 4),
            nn.Conv2d(4, 4, 3, groups=4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2),
        )
    ).train(trains)  # fmt: skip
    model, x = copy.deepcopy(theirs), images(2, 3, 10, 10)
    values = torch.cat([p.detach().flatten() for p in theirs.parameters()])
    flat, begin = values.clone(), 0
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            part = flat[begin : begin + p.numel()].view_as(p)
            setattr(module, name, nn.Parameter(part))
            begin += p.numel()
    torch._dynamo.reset()
    call = ROUTES[route](model)
    with torch.set_grad_enabled(trains):
        for k in range(3):
            found = call(x)
            if trains:
                found.square().sum().backward()
            close(found.detach(), theirs(x).detach())
            flat.untyped_storage().resize_(0)
            flat.untyped_storage().resize_(4 * len(values))
            flat.copy_(values * (k + 2) / 2)
            with torch.no_grad():
                torch.nn.utils.vector_to_parameters(values * (k + 2) / 2, theirs.parameters())
    torch._dynamo.reset()


HOGWILD = """
import sys, torch
from torch import nn, multiprocessing
import blockconv as bc, blockconv.torch

def work(model, go, done):
    with torch.no_grad():
        for k in range(3):
            go.wait(60); go.clear()
            model[0].weight.mul_(1.5)
            done.set()

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False)).share_memory()
    go, done = context.Event(), context.Event()
    child = context.Process(target=work, args=(model, go, done))
    child.start()
    call = bc.torch.convert(model) if sys.argv[1] == "convert" else torch.compile(model, backend=bc.torch.backend)
    x = torch.randn(1, 3, 9, 9)
    with torch.no_grad():
        for _ in range(3):
            call(x)
            go.set(); done.wait(60); done.clear()
            print(torch.allclose(call(x), nn.functional.conv2d(x, model[0].weight), atol=1e-4))
    child.join(60)
"""

RANKS = """
import datetime, sys, torch, torch.distributed as dist
from torch import nn
import blockconv as bc, blockconv.torch

rank, new = int(sys.argv[1]), torch.randn(8, 3, 3, 3, generator=torch.Generator().manual_seed(1))
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))

def coalesced(x):
    with dist._coalescing_manager():
        dist.all_reduce(x)

def batch(x):
    op = dist.P2POp(dist.isend if rank else dist.irecv, x, 1 - rank)
    [work.wait() for work in dist.batch_isend_irecv([op])]

zeros = lambda: torch.zeros_like(new)
whole = lambda x: torch.cat([x.clone(), x.clone()])
WAYS = {
    "broadcast": lambda x: dist.broadcast(x, 1),
    "broadcast, later": lambda x: dist.broadcast(x, 1, async_op=True).wait(),
    "recv": lambda x: dist.send(x, 0) if rank else dist.recv(x, 1),
    "irecv": lambda x: (dist.isend(x, 0) if rank else dist.irecv(x, 1)).wait(),
    "batch": batch,
    "scatter": lambda x: dist.scatter(x, [x.clone(), x.clone()] if rank else None, 1),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_reduce": dist.all_reduce,
    "coalesced": coalesced,
    "all_gather": lambda x: dist.all_gather([zeros(), x], new.clone()),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(x, (new * 2)[4 * rank:4 * rank + 4].clone()),
    "gather": lambda x: dist.gather(new.clone(), None if rank else [zeros(), x], 0),
    "reduce_scatter": lambda x: dist.reduce_scatter(x, [new.clone(), new.clone()]),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x, whole(new)),
    "all_to_all_single": lambda x: dist.all_to_all_single(x, new.clone()),
}
x = torch.randn(1, 3, 9, 9)
for name, write in WAYS.items():
    for route in ("compile", "convert"):
        torch.manual_seed(rank)
        torch._dynamo.reset()
        model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False))
        call = bc.torch.convert(model) if route == "convert" else torch.compile(model, backend=bc.torch.backend)
        with torch.no_grad():
            before = call(x).clone()
            if rank:
                model[0].weight.copy_(new)
            write(model[0].weight.detach())
            found, wanted = call(x), nn.functional.conv2d(x, model[0].weight)
            print(name, route, torch.allclose(found, wanted, atol=1e-4), rank or not torch.allclose(before, wanted))
dist.destroy_process_group()
"""


def run(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.sampled(2)
def test_another_process_writes_shared_weights(route):
    assert run(HOGWILD, route).communicate(timeout=120)[0].split() == ["True"] * 3


@pytest.mark.nightly
@needs_gloo
def test_ranks_that_write_weights(tmp_path):
    ranks = [run(RANKS, str(rank), str(tmp_path / "store")) for rank in (0, 1)]
    told = [each.communicate(timeout=300)[0].splitlines() for each in ranks]
    assert [len(lines) for lines in told] == [30, 30]
    assert not [line for lines in told for line in lines if "False" in line]
