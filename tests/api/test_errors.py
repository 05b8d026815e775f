"""Errors that many functions share: flags that are no bools, packages that are missing."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blockconv as bc

X, W, GRAD = np.ones((1, 3, 4, 4), np.float32), np.ones((2, 3, 1, 1), np.float32), np.ones((1, 3, 2, 2), np.float32)


def network() -> bc.Network:
    b = bc.NetworkBuilder("tiny")
    b.output(b.conv2d(b.input("x", X.shape), W))
    return b.build()


def built(op: str, **flag: Any) -> str:
    b = bc.NetworkBuilder()
    name: str = getattr(b, op)(b.input("x", X.shape), 2, **flag)
    return name


# By (function, argument), a call with this flag.
FLAGS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("max_pool2d", "ceil_mode"): lambda flag: bc.max_pool2d(X, 2, ceil_mode=flag),
    ("max_pool2d", "return_indices"): lambda flag: bc.max_pool2d(X, 2, return_indices=flag),
    ("avg_pool2d", "ceil_mode"): lambda flag: bc.avg_pool2d(X, 2, ceil_mode=flag),
    ("avg_pool2d", "count_include_pad"): lambda flag: bc.avg_pool2d(X, 2, count_include_pad=flag),
    ("max_pool2d_backward", "ceil_mode"): lambda flag: bc.max_pool2d_backward(X, GRAD, 2, ceil_mode=flag),
    ("avg_pool2d_backward", "ceil_mode"): lambda flag: bc.avg_pool2d_backward(X.shape, GRAD, 2, ceil_mode=flag),
    ("avg_pool2d_backward", "count_include_pad"): lambda flag: bc.avg_pool2d_backward(
        X.shape, GRAD, 2, count_include_pad=flag
    ),
    ("conv2d_backward_weights", "bias"): lambda flag: bc.conv2d_backward_weights(X, W.shape, X[:, :2], bias=flag),
    ("group_norm", "per_pixel"): lambda flag: bc.group_norm(X, 3, per_pixel=flag),
    ("group_norm_backward", "per_pixel"): lambda flag: bc.group_norm_backward(X, X, 3, None, X, X, per_pixel=flag),
    ("compile", "measure"): lambda flag: bc.compile(network(), measure=flag),
    ("quantize", "per_channel"): lambda flag: bc.quantize(network(), [X], per_channel=flag),
    ("quantize", "reduce_range"): lambda flag: bc.quantize(network(), [X], reduce_range=flag),
    ("load_onnx", "strict"): lambda flag: bc.load_onnx(b"", strict=flag),
    ("from_torch", "strict"): lambda flag: bc.from_torch(None, X, strict=flag),
    ("Network.evaluate", "every"): lambda flag: network().evaluate(X, every=flag),
    ("NetworkBuilder.max_pool2d", "ceil_mode"): lambda flag: built("max_pool2d", ceil_mode=flag),
    ("NetworkBuilder.avg_pool2d", "ceil_mode"): lambda flag: built("avg_pool2d", ceil_mode=flag),
    ("NetworkBuilder.avg_pool2d", "count_include_pad"): lambda flag: built("avg_pool2d", count_include_pad=flag),
    ("Pool2dProblem", "ceil_mode"): lambda flag: bc.Pool2dProblem("max", 1, 1, 4, 4, 2, 2, ceil_mode=flag),
}
NEEDS = {"load_onnx": "onnx", "from_torch": "torch"}


def callables() -> Iterator[tuple[str, Any]]:
    """The public functions and classes, and the public methods of these."""
    for name in bc.__all__:
        found = getattr(bc, name)
        if callable(found):
            yield name, found
        if inspect.isclass(found):
            for method, value in vars(found).items():
                is_public = not method.startswith("_") and ":meta private:" not in (value.__doc__ or "")
                if is_public and inspect.isfunction(value):
                    yield f"{name}.{method}", value


def test_every_flag_of_a_public_function_is_in_the_table() -> None:
    found = set()
    for name, value in callables():
        with contextlib.suppress(ValueError):  # classes of errors and of dicts have no signature
            parameters = inspect.signature(value).parameters
            found |= {(name, argument) for argument in parameters if parameters[argument].annotation == "bool"}
    assert found == {*FLAGS}


@pytest.mark.parametrize("flag", ["yes", 1, None, np.ones(1, bool)], ids=["str", "int", "None", "array"])
@pytest.mark.parametrize("call", FLAGS, ids=".".join)
def test_a_flag_that_is_no_bool_is_refused(call: tuple[str, str], flag: Any) -> None:
    function, argument = call
    pytest.importorskip(NEEDS.get(function, "numpy"))
    with pytest.raises(bc.ArgumentError, match=rf"{argument}=.*has to be True or False"):
        FLAGS[call](flag)


class Odd:
    """NumPy raises a ValueError for it, and a TypeError for other things that are no dtype."""

    dtype = 1


WRONG: dict[str, Callable[[], Any]] = {
    "conv2d: residual='object'": lambda: bc.conv2d(X, W, residual=np.ones((1, 2, 4, 4), object)),
    "conv1d: groups=-1": lambda: bc.conv1d(X[:, :, 0], W[:, :, 0], groups=-1),
    "conv2d: out_dtype": lambda: bc.conv2d(X, W, out_dtype=Odd()),
    "quantize_linear: dtype": lambda: bc.quantize_linear(X, bc.Quantization(0.1), Odd()),
    "batch_norm: input='object'": lambda: bc.batch_norm(X.astype(object)),
    "conv2d_backward_weights: grad='<U32'": lambda: bc.conv2d_backward_weights(X, W.shape, X[:, :2].astype(str)),
    "max_pool2d_backward: indices=.*dtype float64>": lambda: bc.max_pool2d_backward(X, GRAD, 2, indices=1.5),
    "max_pool2d_backward: indices=.*shape [(]1,[)]": lambda: bc.max_pool2d_backward(X, GRAD, 2, indices=[1]),
    "max_pool2d_backward: kernel_size=0": lambda: bc.max_pool2d_backward(X, GRAD, 0),
}


@pytest.mark.parametrize("named", WRONG)
def test_an_error_names_the_function_and_the_argument_of_the_call(named: str) -> None:
    with pytest.raises(bc.ArgumentError, match=f"^{named}"):
        WRONG[named]()


def test_bools_of_numpy_are_flags() -> None:
    assert bc.Pool2dProblem("max", 1, 1, 5, 5, 2, 2, 2, 2, ceil_mode=np.True_).oh == 3
    assert bc.Pool2dProblem("max", 1, 1, 5, 5, 2, 2, 2, 2, ceil_mode=np.False_).ceil_mode is False


@pytest.mark.parametrize("argument", ["ceil_mode", "return_indices", "count_include_pad"])
def test_flags_of_tensors_with_gradients(argument: str) -> None:
    torch = pytest.importorskip("torch")
    pool = bc.avg_pool2d if argument == "count_include_pad" else bc.max_pool2d
    with pytest.raises(bc.ArgumentError, match=f"{argument}='yes': has to be True or False"):
        pool(torch.ones(X.shape, requires_grad=True), 2, **{argument: "yes"})


MISSING = """
import sys
for package in ("onnx", "torch", "dask"):
    sys.modules[package] = None
import blockconv as bc
from blockconv.__main__ import main
from blockconv.frontends.torch.runner import Session
calls = [
    lambda: bc.load_onnx(b""),
    lambda: bc.from_torch(None, None),
    lambda: __import__("blockconv.onnxruntime"),
    lambda: __import__("blockconv.dask").dask.conv2d(None, None),
    lambda: Session({}, {}, [(["aten.abs"], [], [])]),
]
for call in calls:
    try:
        call()
    except bc.UnsupportedError as error:
        print(error)
assert main(["ops"])
"""


def test_an_error_says_how_to_install_what_is_missing(run_python: Any) -> None:
    done = run_python(MISSING)
    said = [*done.stdout.splitlines(), " ".join(done.stderr.split())]
    packages = ["onnx", "torch", "onnx", "'dask[array]'", "torch", "onnx"]
    assert len(said) == len(packages), said
    for text, package in zip(said, packages, strict=True):
        assert text.endswith(f"pip install {package}"), text


def test_no_text_installs_blockconv_from_a_registry() -> None:
    """It is on none: pip would fail, or install another's package of that name."""
    for path in Path(bc.__file__).parent.rglob("*.py"):
        assert not re.search(r"pip install\W+(-\w+ )?blockconv", path.read_text(encoding="utf-8")), path
