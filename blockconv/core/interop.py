"""Arrays of others as NumPy arrays, without a copy, and results as the kind of array that the caller gave."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockconv.core.checks import MOST_EXTENT, check_shape
from blockconv.core.errors import ArgumentError, DtypeError, failing
from blockconv.core.python import bounded_cache
from blockconv.core.types import Array, element


def as_numpy(x: Any, op: str, argument: str, write: bool = False, kept: bool = False) -> Array:
    """An array, a torch CPU tensor or nested lists as an array, without a copy but for bytes that are swapped.

    write: it is to be written, so it has to be memory that the caller sees. kept: it is read after the call too. Else
    an array of a tensor is read-only. Raises ArgumentError and its kinds for what is no array, or holds more than an
    array can: a mask, a gradient.
    """
    if type(x) is np.ndarray:
        array = x
    elif _is_tensor(x):
        array = _of_tensor(x, op, argument, write or kept)
        if write:  # or autograd, and those who keep packed weights, would not know
            sys.modules["torch"].autograd.graph.increment_version(x)
    elif isinstance(x, np.ma.MaskedArray):
        rule = "is a masked array, and masks are not supported"
        raise ArgumentError(op, argument, x, rule, "give x.filled(value), or x.data to ignore the mask")
    elif isinstance(x, np.ndarray):
        array = x.view(np.ndarray)  # a matrix has two dimensions, whatever its indices
    elif write or isinstance(x, (str, bytes)) or x is None:
        rule = "has to be a NumPy array or a torch CPU tensor" + ", like the input" * write
        raise ArgumentError(op, argument, x, rule)
    else:
        array = _of_object(x, op, argument)
    if array.nbytes > MOST_EXTENT:  # also of a broadcast array, whose copy would be so large
        check_shape(op, argument, array.shape, array.itemsize)
    if write and not array.flags.writeable:
        raise ArgumentError(op, argument, array, "has to be writeable")
    if not write and not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def like(input: Any, result: Array) -> Any:
    """`result` as the kind of array that the input was: a torch tensor of the same memory for a tensor.

    For a subclass of tensors, its `__torch_function__` decides, as it does for results of PyTorch's own functions.
    """
    kind = type(input)
    if kind is np.ndarray or not _is_tensor(input):
        return result
    torch = sys.modules["torch"]
    if result.dtype == _BFLOAT16.dtype:
        tensor = torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(result)
    if kind is torch.Tensor:
        return tensor
    made = kind.__torch_function__(lambda _: tensor, (kind,), (input,), {})
    return tensor if made is NotImplemented else made


def like_any(inputs: Iterable[Any], result: Array) -> Any:
    """`result` as a torch tensor of the same memory if any of the inputs is one, else as it is."""
    return like(first_tensor(inputs), result)


def first_tensor(inputs: Iterable[Any]) -> Any:
    """The first torch tensor among the inputs; None without one."""
    for x in inputs:
        if type(x) is not np.ndarray and _is_tensor(x):
            return x
    return None


_BFLOAT16 = element("bfloat16")  # whose dtype is not asked for before it is needed


@bounded_cache
def _is_tensors(kind: type) -> bool:
    """Whether a type is PyTorch's tensor or a subclass, without an import of PyTorch: else there is none."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return isinstance(tensor, type) and issubclass(kind, tensor)


def _is_tensor(x: Any) -> bool:
    return _is_tensors(type(x))  # type: ignore[arg-type]


def _is_module(x: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "nn") and isinstance(x, torch.nn.Module)


def as_file(x: object) -> str:
    """The remedy for a module of PyTorch where a network has to be; "" for anything else."""
    return "call from_torch(module, example_inputs)" if _is_module(x) else ""


_gradients: list[Callable[[], Any]] = []  # the loader of functions that have gradients, if one was given


def gradients_from(load: Callable[[], Any]) -> None:
    """Let functions on tensors that require a gradient call those of the same name in what `load` gives."""
    _gradients[:] = [load]


def traced(*tensors: Any) -> bool:
    """Whether a call with these tensors has to be an op of PyTorch's. It has to if torch.compile, torch.export, a
    transform or a trace follows it, or if the tensors have no values. Needs torch in the process.

    PyTorch's own `is_compiling` is one flag for all threads. It is true in calls that run beside a compiling thread.
    """
    torch = sys.modules["torch"]
    if torch.compiler.is_dynamo_compiling():  # which Dynamo reads as true, and nobody else does
        return True
    return followed() or any(_is_tensor(x) and not has_values(x) for x in tensors)


def followed() -> bool:
    """Whether a dispatch mode, a transform of torch.func or torch.jit.trace follows all calls of this thread."""
    state = sys.modules["torch"]._C
    modes = state._len_torch_dispatch_stack() or state._are_functorch_transforms_active()
    return bool(modes or state._get_tracing_state() is not None)


def has_values(x: Any) -> bool:
    """Whether a tensor has values: not a fake one, one of a trace, one of the device "meta", which stand for others."""
    return not x.is_meta and type(x).__torch_dispatch__ is sys.modules["torch"].Tensor.__torch_dispatch__


def needs_pytorch(*tensors: Any) -> bool:
    """Whether a call with these has to be ops of PyTorch's: if `traced`, or if one has a gradient or a tangent."""
    for x in tensors:
        if x is not None and type(x) is not np.ndarray:
            break
    else:  # most calls
        return False
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "compiler"):
        return False
    if torch.compiler.is_dynamo_compiling() or (followed() and any(map(_is_tensor, tensors))):
        return True
    enabled, tangents = torch.is_grad_enabled(), follows_tangents()
    for x in tensors:  # a generator takes longer
        if _is_tensor(x) and ((enabled and x.requires_grad) or not has_values(x) or (tangents and has_tangent(x))):
            return True
    return False


def with_gradient(op: str, tensors: tuple[Any, ...], **without: Any) -> Any:
    """The function `op` with a gradient, if a call with these tensors `needs_pytorch`; else None.

    Also None where no function of this name has a gradient.

    without: options that the function with a gradient does not have, which must have their defaults.
    """
    if not needs_pytorch(*tensors):
        return None
    is_traced = traced(*tensors)
    if not is_traced:
        for argument, x in zip(_TENSORS, tensors, strict=False):
            if x is not None and not _is_tensor(x):
                rule = "has to be a tensor, because another argument is one that requires a gradient"
                raise ArgumentError(op, argument, x, rule, "give torch.from_numpy(x) for an array")
    for argument, value in without.items():
        if value is None or (isinstance(value, str) and value in _DEFAULTS):
            continue
        if is_traced:
            raise ArgumentError(op, argument, value, "has no op of PyTorch's, and a trace or a transform needs one")
        rule = "has no gradient, and a tensor requires one"
        raise ArgumentError(op, argument, value, rule, "for inference call it under torch.no_grad()")
    return getattr(_gradients[0](), op, None) if _gradients else None


_DEFAULTS = "auto", "default", "half_even"  # of algorithm, accuracy and rounding
_TENSORS = "input", "weight", "bias", "residual"  # in the order of the functions


def follows_tangents() -> bool:
    """Whether forward-mode differentiation follows calls: not inside a function that has a rule for it."""
    torch = sys.modules["torch"]
    return torch.autograd.forward_ad._current_level >= 0 and bool(torch._C._is_fwd_grad_enabled())


def has_tangent(x: Any) -> bool:
    """Whether a tensor has a derivative of forward-mode differentiation too."""
    return follows_tangents() and sys.modules["torch"].autograd.forward_ad.unpack_dual(x).tangent is not None


def as_autocast(input: Any, *others: Any) -> tuple[Any, ...]:
    """Arguments of a convolution of a tensor as PyTorch's own reads them under `torch.autocast`.

    Tensors of float32, bfloat16 and float16 become the type of autocast; anything else stays as it is.
    """
    if not _is_tensor(input) or not (torch := sys.modules["torch"]).is_autocast_enabled("cpu"):
        return input, *others
    dtype, taken = torch.get_autocast_dtype("cpu"), (torch.float32, torch.bfloat16, torch.float16)
    return tuple(x.to(dtype) if _is_tensor(x) and x.dtype in taken else x for x in (input, *others))


_plain: set[int] = set()  # the dispatch keys of tensors that are plain memory of the CPU


@bounded_cache
def _is_plain(kind: type) -> bool:
    """Whether a type is PyTorch's tensor or parameter, and no subclass."""
    return _is_tensors(kind) and kind in (sys.modules["torch"].Tensor, sys.modules["torch"].nn.Parameter)


def tensor_order(x: Any) -> tuple[Any, ...] | None:
    """The properties of a torch tensor that decide its kernel, without its address.

    None for anything but plain memory of the CPU, for a tensor that requires a gradient, and while tangents are
    followed: `as_numpy` reads or refuses those.
    """
    if not _is_plain(type(x)):  # type: ignore[arg-type]
        return None
    torch = sys.modules["torch"]
    if not _plain and not followed() and hasattr(torch._C, "_dispatch_keys"):
        for is_inference in (False, True):
            with torch.inference_mode(is_inference):
                _plain.add(torch._C._dispatch_keys(torch.empty(0, device="cpu")).raw_repr())
    is_watched = follows_tangents() or (x.requires_grad and torch.is_grad_enabled())
    if is_watched or torch._C._dispatch_keys(x).raw_repr() not in _plain:
        return None
    return x.shape, x.stride(), x.dtype, x.data_ptr() & 7


def _of_tensor(x: Any, op: str, argument: str, kept: bool) -> Array:
    torch = sys.modules["torch"]
    if not _is_plain(type(x)):  # type: ignore[arg-type]
        # A subclass may watch calls of PyTorch's functions. These reads are none that it should see.
        with torch._C.DisableTorchFunctionSubclass():
            return _memory_of(torch, x, op, argument, True)
    return _memory_of(torch, x, op, argument, kept)


@dataclass
class _Exported:
    """A tensor on the CPU as NumPy 1.26 reads it, which calls methods of its class, and unpacks tuples."""

    tensor: Any

    def __dlpack__(self, **_: Any) -> Any:
        return sys.modules["torch"]._C._to_dlpack(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def _numpy(x: Any, kept: bool) -> Array:
    """The memory of a tensor. After `Tensor.numpy`, PyTorch refuses to resize its storage, as FSDP does."""
    x = x.resolve_neg()  # its sign may be a bit of the tensor
    return x.numpy() if kept or x.is_conj() or x._is_zerotensor() else np.from_dlpack(_Exported(x))


def _memory_of(torch: Any, x: Any, op: str, argument: str, kept: bool) -> Array:
    if has_tangent(x):
        rule = "carries a tangent of forward-mode differentiation, which ends here"
        raise ArgumentError(op, argument, x, rule, "call a function of blockconv.torch.functional, or PyTorch's own")
    if x.requires_grad and torch.is_grad_enabled():
        remedy = (
            "call the functions of blockconv.torch.functional, which have gradients. For inference call it under "
            "torch.no_grad(); x.detach() silently stops training: gradients stay None"
        )
        raise ArgumentError(op, argument, x, "requires a gradient, which ends here", remedy)
    try:
        if x.dtype is torch.bfloat16:  # NumPy can read its bits
            return _numpy((x.detach() if x.requires_grad else x).view(torch.int16), kept).view(_BFLOAT16.dtype)
        return _numpy(x, kept)
    except failing(TypeError, RuntimeError, BufferError) as error:
        if x.device.type != "cpu":
            raise ArgumentError(op, argument, x, "has to be on the CPU", "give x.cpu()") from None
        raise DtypeError(op, argument, x, f"cannot be read as an array ({error})") from None  # a sparse one


# Remedies for arrays of other libraries, by the package of their type.
_COMPUTED = {
    "dask": "call map_plan or conv2d of blockconv.dask, or give x.compute()",
    "zarr": "give numpy.asarray(x); Plan.tiled and blockconv.dask compute it by tiles",
    "cupy": "give cupy.asnumpy(x)",
}


def _of_object(x: Any, op: str, argument: str) -> Array:
    if _is_module(x) and hasattr(x, "weight"):
        kind = type(x).__name__
        remedy = "give its parameters: module.weight.detach(), module.bias.detach(), module.stride, module.padding, ..."
        raise ArgumentError(op, argument, kind, f"is a torch module, and {argument} has to be an array", remedy)
    package = type(x).__module__.partition(".")[0]
    if hasattr(x, "__array__") and package not in ("numpy", "ml_dtypes", "blockconv"):
        rule = f"is an array of {package}; a conversion may compute or copy all of it"
        raise ArgumentError(op, argument, x, rule, _COMPUTED.get(package, "give numpy.asarray(x)"))
    try:
        return np.asarray(x)
    except failing(TypeError, ValueError, RuntimeError) as error:  # ragged lists, arrays of other devices
        raise ArgumentError(op, argument, x, f"cannot be read as an array ({error})") from None
