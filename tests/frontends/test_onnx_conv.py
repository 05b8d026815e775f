"""The ONNX backend test suite's Conv cases through bc.conv2d: node tests, and models exported from PyTorch.

Every case of the suite that holds a Conv or ConvTranspose is listed: it is run, or named with the reason why not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from storage_oracle import places, stored

import blockconv as bc

onnx = pytest.importorskip("onnx")
from onnx import helper, numpy_helper  # noqa: E402
from onnx_cases import Case, exported_cases, node_cases  # noqa: E402

OPS = {"Conv", "ConvTranspose"}
LAYOUTS = ("NCHW", "NHWC", "NCHW4", "NCHW8", "NCHW16", "NCHW32", "NCHW64", "CHWN4")


def _convolutions(cases: dict[str, Case]) -> dict[str, Case]:
    return {name: case for name, case in cases.items() if OPS & {node.op_type for node in case.model.graph.node}}


NODE, EXPORTED = _convolutions(node_cases()), _convolutions(exported_cases())
CASES = {**NODE, **EXPORTED}


def _conv(case: Case) -> Any:
    return next(node for node in case.model.graph.node if node.op_type in OPS)


def _operands(case: Case) -> list[np.ndarray]:
    """x, w and, if there is one, the bias."""
    graph = case.model.graph
    constants = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    fed = [value.name for value in graph.input if value.name not in constants]
    values = {**constants, **dict(zip(fed, case.inputs, strict=True))}
    return [values[name] for name in _conv(case).input]


def why_not(case: Case) -> str | None:
    node = _conv(case)
    if node.op_type == "ConvTranspose":
        return "transposed"
    if len(case.model.graph.node) > 1:
        return "a graph of several nodes"
    return "3-D" if _operands(case)[0].ndim == 5 else None


RUN = sorted(name for name, case in CASES.items() if why_not(case) is None)
NOT_SUPPORTED = {name: reason for name, case in CASES.items() if (reason := why_not(case)) is not None}


def call(case: Case, layout: str | None = None) -> np.ndarray:
    """The Conv node, read by ONNX's rules, through conv2d (or conv1d); x goes in and comes out in `layout`."""
    attributes = {a.name: helper.get_attribute_value(a) for a in _conv(case).attribute}
    x, w, *bias = _operands(case)
    spatial = x.ndim - 2
    assert attributes.get("kernel_shape", list(w.shape[2:])) == list(w.shape[2:])
    stride = attributes.get("strides", [1] * spatial)
    dilation = attributes.get("dilations", [1] * spatial)
    pads = attributes.get("pads", [0] * (2 * spatial))
    sides = list(zip(pads[:spatial], pads[spatial:], strict=True))
    auto_pad = attributes.get("auto_pad", b"NOTSET").decode()
    if auto_pad.startswith("SAME"):
        sides = []
        for size, k, s, d in zip(x.shape[2:], w.shape[2:], stride, dilation, strict=True):
            total = max(0, (-(-size // s) - 1) * s + d * (k - 1) + 1 - size)
            less = total // 2
            sides.append((less, total - less) if auto_pad == "SAME_UPPER" else (total - less, less))
    elif auto_pad == "VALID":
        sides = [(0, 0)] * spatial
    if spatial == 1:  # as conv1d has it, over (N, C, 1, L)
        x, w = x[:, :, None], w[:, :, None]
        stride, dilation, sides = [1, *stride], [1, *dilation], [(0, 0), *sides]
    given: Any = x
    if layout is not None:
        tag = bc.Layout(layout)
        given = bc.BlockedArray(stored(x, layout, np.nan).reshape(tag.storage_shape(x.shape)), tag, x.shape)
    y = bc.conv2d(given, w, *bias, stride=stride, padding=sides, dilation=dilation, groups=attributes.get("group", 1))
    if layout is not None:
        y = y.storage.reshape(-1)[places(layout, y.shape)[0]]
    return y[:, :, 0] if spatial == 1 else y


def test_how_many_cases_there_are():
    """So that a case that a new onnx renames or drops is noticed, and none is passed over in silence."""
    assert len(CASES) == len(RUN) + len(NOT_SUPPORTED)
    assert len([name for name in RUN if name in NODE]) >= 6
    assert len([name for name in RUN if name in EXPORTED]) >= 20
    parts = {"transposed": "transpose", "3-D": "conv3d", "a graph of several nodes": "_expanded"}
    for name, reason in NOT_SUPPORTED.items():
        assert parts[reason] in name.lower()


@pytest.mark.parametrize("name", RUN)
@pytest.mark.sampled(3)
def test_case(name):
    case = CASES[name]
    found = call(case)
    assert found.shape == case.outputs[0].shape
    np.testing.assert_allclose(found, case.outputs[0], rtol=case.rtol, atol=case.atol)
    if RUN.index(name) % 3 == 0:  # some in another layout too
        layout = LAYOUTS[1 + RUN.index(name) // 3 % (len(LAYOUTS) - 1)]
        np.testing.assert_allclose(call(case, layout), case.outputs[0], rtol=case.rtol, atol=case.atol, err_msg=layout)


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_case_not_supported(name):
    pytest.skip(f"not supported: {NOT_SUPPORTED[name]}")
