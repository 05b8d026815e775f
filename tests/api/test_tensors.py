"""What PyTorch's own functions do of tensors beside arithmetic: subclasses, gradients, autocast."""

from __future__ import annotations

import numpy as np
import pytest
from conv_arrays import F, W, X, close, torch
from torch.utils._python_dispatch import TorchDispatchMode

import blockconv as bc


class Plain(torch.Tensor):
    pass


class Noted(torch.Tensor):
    """Of a rule of its own: what PyTorch's functions give carries what the first of their arguments carries."""

    note = "none"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Noted):
            result.note = next((x.note for x in args if isinstance(x, Noted)), "none")
        return result


class Unwrapped(torch.Tensor):
    """As torchvision's images are: no function gives one."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def plan(x):
    b = bc.NetworkBuilder()
    b.output(b.conv2d(b.input("x", X.shape), W))
    return bc.compile(b.build())(x)


CALLS = {  # ours, PyTorch's
    "conv2d": (lambda x: bc.conv2d(x, torch.from_numpy(W)), lambda x: F.conv2d(x, torch.from_numpy(W))),
    "Conv2d": (bc.Conv2d(W), lambda x: F.conv2d(x, torch.from_numpy(W))),
    "plan": (plan, lambda x: F.conv2d(x, torch.from_numpy(W))),
    "max_pool2d": (lambda x: bc.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 2)),
    "avg_pool2d": (lambda x: bc.avg_pool2d(x, 2), lambda x: F.avg_pool2d(x, 2)),
    "conv1d": (
        lambda x: bc.conv1d(x[:, :, 0], torch.from_numpy(W[:, :, 0])),
        lambda x: F.conv1d(x[:, :, 0], torch.from_numpy(W[:, :, 0])),
    ),
}


@pytest.mark.parametrize("kind", [Plain, Noted, Unwrapped, torch.nn.Parameter, torch.nn.Buffer])
@pytest.mark.parametrize("name", CALLS)
def test_a_subclass_comes_back_as_from_torchs_own(name, kind):
    ours, theirs = CALLS[name]
    x = torch.from_numpy(X.copy())
    given = kind(x) if kind.__module__.startswith("torch") else x.as_subclass(kind)
    if kind is Noted:
        given.note = "mine"
    with torch.no_grad():
        for _ in range(2):  # the second call is a repeated one
            found, wanted = ours(given), theirs(given)
            assert type(found) is type(wanted)
            assert getattr(found, "note", "") == getattr(wanted, "note", "")
            close(found.as_subclass(torch.Tensor).numpy(), wanted.as_subclass(torch.Tensor).numpy())


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["conv2d", "max_pool2d", "avg_pool2d"])
@pytest.mark.sampled(3)
def test_autocast_is_torchs(name, dtype, autocast):
    """Convolutions compute in its type, unless they are of float64; pools in that of their input."""
    x, w = torch.from_numpy(X).to(dtype), torch.from_numpy(W).to(dtype)
    ours = {"conv2d": lambda: bc.conv2d(x, w, w[:, 0, 0, 0], padding=1)}.get(name, lambda: CALLS[name][0](x))
    theirs = {"conv2d": lambda: F.conv2d(x, w, w[:, 0, 0, 0], padding=1)}.get(name, lambda: CALLS[name][1](x))
    with torch.autocast("cpu", dtype=autocast):
        found, wanted = ours(), theirs()
        assert found.dtype == wanted.dtype == (autocast if name == "conv2d" and dtype != torch.float64 else dtype)
        assert (found.double() - wanted.double()).abs().max() <= 0.02 * wanted.double().abs().max()
    assert ours().dtype == dtype


def test_autocast_of_what_is_packed_once_and_of_arrays():
    x, conv = torch.from_numpy(X), bc.Conv2d(W, padding=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert conv(x).dtype == torch.bfloat16
        assert conv(x, residual=torch.zeros(conv(x).shape)).dtype == torch.bfloat16
        assert bc.conv1d(x[:, :, 0], torch.from_numpy(W[:, :, 0])).dtype == torch.bfloat16
        assert conv(X).dtype == X.dtype
        assert conv(bc.to_layout(X, "NCHW8")).dtype == X.dtype
        doubled = bc.Conv2d(W.astype("f8"), padding=1)
        assert doubled(x.double()).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert conv(x).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_storages_stay_resizable_unless_they_are_kept(name, dtype):
    x, w = torch.from_numpy(X).clone().to(dtype), torch.from_numpy(W).clone()
    if name != "plan" or dtype is torch.float32:
        CALLS[name][0](x)
    bc.conv2d(x, w.to(dtype))
    assert x.untyped_storage().resizable()
    assert w.untyped_storage().resizable()
    bc.Conv2d(w)
    assert not w.untyped_storage().resizable()


def test_bits_that_change_a_tensors_values():
    """Signs and conjugates that are bits of a tensor, and zeros without memory."""
    z = torch.complex(*(torch.from_numpy(X + k) for k in (0, 1)))
    for x in (torch.imag(z.conj()), torch.imag(torch.conj(z)).real, torch.real(z.conj())):
        close(bc.conv2d(x, W).numpy(), bc.conv2d(x.resolve_neg().clone().numpy(), W))
    for x in (z.conj(), torch._efficientzerotensor(X.shape)):
        with pytest.raises(bc.DtypeError, match="cannot be read as an array"):
            bc.conv2d(x, W)


def unaligned(x):
    """The same numbers, two bytes after a multiple of four."""
    memory = torch.empty(4 * x.numel() + 8, dtype=torch.uint8)
    array = np.frombuffer(memory.numpy().data, np.float32, x.numel(), 2).reshape(x.shape)
    array[...] = x.numpy()
    return torch.frombuffer(memory.numpy().data, dtype=torch.float32, count=x.numel(), offset=2).reshape(x.shape)


def test_a_known_call_sees_what_a_tensor_is():
    """Shape, strides and dtype of a tensor do not say all that a call has to know."""
    x, w = torch.from_numpy(X.copy()), torch.from_numpy(W.copy())
    grad = torch.ones(F.conv2d(x, w).shape)
    for _ in range(2):
        wanted = bc.conv2d(x, w)
        bc.conv2d_backward_data(tuple(x.shape), w, grad)
    assert torch.equal(bc.conv2d(torch._neg_view(x), w), -wanted)
    assert torch.equal(bc.conv2d(x, torch._neg_view(w)), -wanted)
    assert torch.equal(bc.conv2d(unaligned(x), w), wanted)
    assert torch.equal(bc.conv2d(x, unaligned(w)), wanted)
    with torch.inference_mode():
        assert torch.equal(bc.conv2d(x.clone(), w), wanted)
    for other in (torch._efficientzerotensor(X.shape), x.to_sparse(), x.to(torch.complex64)):
        with pytest.raises(bc.DtypeError):
            bc.conv2d(other, w)
    with pytest.raises(bc.ArgumentError, match="requires a gradient"):
        bc.conv2d_backward_data(tuple(x.shape), w, grad.clone().requires_grad_())
    with pytest.raises(bc.ArgumentError, match="has to be on the CPU"):
        bc.conv2d_backward_data(tuple(x.shape), w, grad.to("meta"))
    with torch.no_grad():
        assert torch.equal(bc.conv2d(x.clone().requires_grad_(), w), wanted)
    doubled = torch.func.vmap(lambda each: bc.conv2d(each, w))(torch.stack([x, 2 * x]))
    close(doubled[1].numpy(), 2 * wanted.numpy())


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_of_torchs_leaves_other_arrays_alone():
    x, blocked = X.copy(), bc.to_layout(X, "NCHW8")
    for call in (lambda x: bc.conv2d(x, W), lambda x: bc.max_pool2d(x, 2), lambda x: bc.avg_pool2d(x, 2)):
        wanted = call(x)
        with Watched():
            assert isinstance(call(x), np.ndarray)
            close(call(blocked).numpy(), wanted)
