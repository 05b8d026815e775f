"""conv2d called again on arrays that lie as those of a call before: only what the arrays hold may differ."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest
from conv_arrays import RNG, SHAPE, B, F, W, X, channels_last, close, like_torch, torch, unaligned

import blockconv as bc
from blockconv.api import frame
from blockconv.dispatch import boundary, packing


@pytest.fixture(autouse=True)
def nothing_called(monkeypatch):
    monkeypatch.setattr(frame, "_kept", {})


def fresh(like):
    return RNG.standard_normal(like.shape, dtype=np.float32)


@pytest.mark.parametrize("bias", [None, B], ids=["no bias", "bias"])
@pytest.mark.parametrize("source", [lambda x: x, channels_last], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("weight", [lambda x: x, channels_last], ids=["OIHW", "OHWI"])
def test_each_call_has_the_values_of_its_own_arrays(source, weight, bias):
    for _ in range(3):
        x, w, b = fresh(X), fresh(W), None if bias is None else fresh(bias)
        got = bc.conv2d(source(x), weight(w), b, padding=1)
        close(got, like_torch(x, w, b, padding=1))
        assert len(frame._kept) == 1
    assert bc.conv2d(source(X), weight(W), bias, padding=1).strides == got.strides


def test_tensors_and_arrays_are_kept_apart():
    for _ in range(2):
        given = torch.from_numpy(fresh(X)), torch.from_numpy(fresh(W))
        got = bc.conv2d(*given, padding=1)
        assert isinstance(got, torch.Tensor)
        close(got.numpy(), F.conv2d(*given, padding=1).numpy())
        alike = bc.conv2d(given[0].numpy(), given[1].numpy(), padding=1)
        assert isinstance(alike, np.ndarray)
        np.testing.assert_array_equal(alike, got.numpy())
    assert len(frame._kept) == 2, "a known call of tensors makes no arrays of them"


def test_arrays_that_lie_otherwise_are_told_apart():
    for _ in range(2):
        for x, w in ((X, W), (channels_last(X), W), (X, channels_last(W)), (channels_last(X), channels_last(W))):
            got = bc.conv2d(x, w, B, padding=1)
            close(got, like_torch(X, W, B, padding=1))
            assert bc.is_channels_last(got) == (x is not X or w is not W)
    assert len(frame._kept) == 4


def test_images_without_a_batch():
    for _ in range(2):
        x, w = fresh(X[0]), fresh(W)
        close(bc.conv2d(x, w, padding=1), like_torch(x[None], w, padding=1)[0])


@pytest.mark.parametrize("groups", [2, 6])
def test_groups(groups):
    w = RNG.standard_normal((12, 6 // groups, 3, 3), dtype=np.float32)
    for _ in range(2):
        x, w = RNG.standard_normal((2, 6, 9, 7), dtype=np.float32), fresh(w)
        close(bc.conv2d(x, w, stride=2, groups=groups), like_torch(x, w, stride=2, groups=groups))


def test_arrays_that_are_copied_are_looked_at_each_time():
    """Every second pixel, rows from the last to the first, elements across words: none may be read in place."""
    wide = np.zeros((*X.shape[:3], 2 * X.shape[3]), np.float32)
    flipped = np.ascontiguousarray(W[:, :, ::-1])
    for _ in range(2):
        x = wide[..., ::2]
        x[...] = fresh(X)
        close(bc.conv2d(x, flipped[:, :, ::-1], padding=1), like_torch(np.ascontiguousarray(x), W, padding=1))
    assert len(frame._kept) == 1
    close(bc.conv2d(X, W, padding=1), like_torch(X, W, padding=1))
    close(bc.conv2d(unaligned(X), W, padding=1), like_torch(X, W, padding=1))


def test_options_that_are_equal_but_of_other_types_are_told_apart():
    bc.conv2d(X, W, padding=1)
    with pytest.raises(bc.ArgumentError, match="padding=True"):
        bc.conv2d(X, W, padding=True)
    with pytest.raises(bc.ArgumentError, match=r"padding=1\.0"):
        bc.conv2d(X, W, padding=1.0)
    bc.conv2d(X, W, padding=np.int64(1))


def test_what_is_refused_is_refused_after_a_call_that_was_not():
    x, w = torch.from_numpy(X), torch.from_numpy(W)
    for _ in range(2):
        bc.conv2d(x, w, padding=1)
    assert bc.conv2d(x.clone().requires_grad_(), w, padding=1).requires_grad
    with pytest.raises(bc.DtypeError, match="float64"):
        bc.conv2d(x.double(), w, padding=1)
    with pytest.raises(bc.DtypeError, match="int32"):  # of the same strides
        bc.conv2d(x.int(), w, padding=1)
    with pytest.raises(bc.ArgumentError, match="bias"):
        bc.conv2d(x, w, torch.zeros(W.shape[0] + 1), padding=1)
    close(bc.conv2d(x, w, padding=1, out=torch.empty(SHAPE)).numpy(), F.conv2d(x, w, padding=1).numpy())


def test_the_number_of_threads_counts():
    held = bc.get_num_threads()
    try:
        for threads in (1, held, 1):
            bc.set_num_threads(threads)
            close(bc.conv2d(X, W, padding=1), like_torch(X, W, padding=1))
    finally:
        bc.set_num_threads(held)
    assert len(frame._kept) == len({1, held})


def test_weights_beyond_what_a_thread_keeps(monkeypatch):
    """They are packed into memory of the call's own, each time."""
    monkeypatch.setattr(packing, "KEPT", 64)
    for _ in range(2):
        x, w = fresh(X), fresh(W)
        close(bc.conv2d(x, w, padding=1), like_torch(x, w, padding=1))


def test_problems_are_kept_by_the_hundred_and_no_more(monkeypatch):
    monkeypatch.setattr(boundary, "KEPT", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for width in range(5, 15):
            x = RNG.standard_normal((1, 3, 5, width), dtype=np.float32)
            w = RNG.standard_normal((4, 3, 1, 1), dtype=np.float32)
            close(bc.conv2d(x, w), like_torch(x, w))
            assert len(frame._kept) <= 4


@pytest.mark.parametrize("source", [lambda x: x, channels_last, torch.from_numpy], ids=["NCHW", "NHWC", "tensor"])
def test_each_pool_has_the_values_of_its_own_array(source):
    for _ in range(3):
        x = fresh(X)
        got = bc.max_pool2d(source(x), 2)
        close(np.asarray(got), F.max_pool2d(torch.from_numpy(x), 2).numpy())
        assert type(got) is type(source(x))
        assert bc.is_channels_last(np.asarray(got)) == (source is channels_last)
        assert len(frame._kept) == 1


def test_pools_of_images_without_a_batch_and_of_copied_arrays():
    for _ in range(2):
        x = fresh(X)
        wanted = F.avg_pool2d(torch.from_numpy(x), 2).numpy()
        close(bc.avg_pool2d(np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1], 2), wanted)
        assert all(bound.read for bound in frame._kept.values())
    for _ in range(2):
        close(bc.avg_pool2d(x[0], 2), wanted[0])
        close(bc.avg_pool2d(unaligned(x), 2), wanted)


def test_a_known_pool_lets_no_wrong_argument_pass():
    for _ in range(2):
        bc.max_pool2d(X, 2)
    for kernel_size in (2.0, [2, 2, 2]):
        with pytest.raises(bc.ArgumentError, match="kernel_size"):
            bc.max_pool2d(X, kernel_size)
    with pytest.raises(bc.DtypeError, match="int32"):  # of the same strides
        bc.max_pool2d(X.astype(np.int32), 2)
    with pytest.raises(bc.ArgumentError, match="overlap"):
        bc.max_pool2d(X, 1, out=X)


def calls_of_python(run):
    """The number of Python functions that a call enters."""
    entered = []
    run(), run()
    sys.setprofile(lambda frame, event, arg: entered.append(frame.f_code.co_name) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return entered[1:]


@pytest.mark.parametrize(("what", "most"), [("conv2d", 24), ("pool", 16), ("plan", 28)])
def test_a_repeated_call_enters_few_functions(what, most):
    """Each takes about 0.1 us, and a small network takes 3."""
    b = bc.NetworkBuilder()
    b.output(b.max_pool2d(b.input("x", X.shape), 2))
    plan = bc.compile(b.build(), threads=1)
    runs = {"conv2d": lambda: bc.conv2d(X, W), "pool": lambda: bc.max_pool2d(X, 2), "plan": lambda: plan(X)}
    held = bc.get_num_threads()
    bc.set_num_threads(1)
    try:
        entered = calls_of_python(runs[what])
    finally:
        bc.set_num_threads(held)
    assert len(entered) <= most, entered
