"""What `help` says: of every function that takes arrays or networks all its arguments, its errors and an example."""

from __future__ import annotations

import doctest
import inspect

import pytest

import blockconv as bc

COMPLETE = (
    "Conv2d",
    "adaptive_avg_pool2d",
    "avg_pool2d",
    "compile",
    "conv1d",
    "conv2d",
    "explain",
    "global_avg_pool2d",
    "global_max_pool2d",
    "load_onnx",
    "max_pool2d",
    "set_num_threads",
    "to_layout",
)


@pytest.mark.parametrize("name", COMPLETE)
def test_help_is_complete_by_itself(name: str) -> None:
    subject = getattr(bc, name)
    text = inspect.getdoc(subject) or ""
    for parameter in inspect.signature(subject).parameters:
        if parameter != "op":  # of Conv2d: whose name stands in its errors
            assert f"{parameter}:" in text or f"{parameter}," in text, parameter
    assert "Raises " in text


@pytest.mark.parametrize("name", COMPLETE)
def test_the_examples_of_help_say_what_they_say(name: str) -> None:
    if name == "load_onnx":
        pytest.importorskip("onnx")
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(bc, name), name, globs={})
    assert test.examples, "no example"
    report: list[str] = []
    doctest.DocTestRunner().run(test, out=report.append)
    assert not report, "".join(report)
