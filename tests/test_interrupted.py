"""An exception that interrupts the library, such as the time limit of a handler of signals, reaches the caller.

Its kind does not matter: `except failing(...)` tells it from what libraries raise.
"""

from __future__ import annotations

import ast
import inspect
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv.core.errors import failing, ignoring

PACKAGE = Path(bc.__file__).parent
# Kinds of time limits that programs use. Others are no kinds that libraries raise.
WIDE = ("Exception", "BaseException", "OSError", "TimeoutError", "RuntimeError", "AssertionError")
MAY_TAKE_ALL = re.compile(rf"except:|(except|suppress)\b.*\b({'|'.join(WIDE)}|[A-Z_]{{3,}})\b")
# Who may take these without `failing`, by file and function, and why.
TAKE_ALL = {
    ("cli/output.py", "run"): "is the command line, whose program installs no handler",
    ("cli/output.py", "_open"): "likewise",
    ("cli/run.py", "read"): "likewise",
    ("core/errors.py", "short"): "the `repr` of a user's object must not hide what the message is about",
    ("core/files.py", "replacing"): "raises it again",
    ("jit/compile_processes.py", "compile_together"): "raises it again",
    ("jit/private_directory.py", "write"): "raises it again",
    ("jit/translate.py", "emit"): "takes what code of kernels raises, which is no kind of a limit",
    ("onnxruntime/session.py", "work"): "gives it to a callback, in a thread, where no handler of signals runs",
}


def takes_all(handler: ast.AST | None) -> bool:
    """Whether an `except` takes exceptions of time limits; its type may be one of several."""
    if isinstance(handler, ast.Tuple):
        return any(map(takes_all, handler.elts))
    return handler is None or (isinstance(handler, ast.Name) and (handler.id in WIDE or handler.id.isupper()))


def found_in(text: str) -> set[str]:
    """The functions with such an `except`, or with `contextlib.suppress` of it."""
    found, waiting = set(), [("", ast.parse(text).body)] if MAY_TAKE_ALL.search(text) else []
    while waiting:
        name, nodes = waiting.pop()
        for node in nodes:
            inner = node.name if isinstance(node, ast.FunctionDef) else name
            waiting.append((inner, list(ast.iter_child_nodes(node))))
            suppresses = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "suppress"
            if (isinstance(node, ast.ExceptHandler) and takes_all(node.type)) or (
                suppresses and any(map(takes_all, node.args))
            ):
                found.add(name)
    return found


def test_only_those_with_a_reason_take_exceptions_of_handlers() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in PACKAGE.rglob("*.py")
        for name in found_in(path.read_text(encoding="utf-8"))
    }
    assert found == TAKE_ALL.keys()


@pytest.mark.parametrize(
    "line", ["except Exception as error:", "except:", "except (ValueError, OSError):", "except FAILURES:"]
)
def test_they_are_seen(line: str) -> None:
    assert found_in(f"def work():\n    try:\n        pass\n    {line}\n        pass") == {"work"}
    assert found_in("def work():\n    with contextlib.suppress(OSError):\n        pass") == {"work"}


class TimeLimitError(Exception):
    """As a handler of SIGALRM raises."""


LIMITS = [TimeLimitError, TimeoutError, RuntimeError, AssertionError]


class Handler:
    """A handler of signals, which raises `raised`, and ways to install it."""

    raised: Exception

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise self.raised

    def method(self, number: int, frame: FrameType | None) -> None:
        self(number, frame)

    def by_name(self, name: str, number: int, frame: FrameType | None) -> None:
        self(number, frame)

    def ways(self) -> dict[str, Any]:
        function = lambda *given: self(*given)  # noqa: E731
        return {"object": self, "method": self.method, "partial": partial(self.by_name, "a"), "function": function}


HANDLER = Handler()


@pytest.fixture
def handled() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, HANDLER)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("way", Handler().ways())
def test_how_a_handler_is_installed(way: str, limit: type[Exception], handled: None) -> None:
    signal.signal(signal.SIGINT, HANDLER.ways()[way])
    HANDLER.raised = limit("a limit")
    with pytest.raises(limit, match="a limit"), ignoring(limit):
        signal.raise_signal(signal.SIGINT)
    with ignoring(limit):
        raise limit
    try:
        raise limit
    except failing():
        assert limit is not TimeLimitError
    except TimeLimitError:
        pass


def calls(work: Callable[[], Any], at: int = 0) -> int:
    """The calls of Python functions that `work` makes. Entering number `at` raises what the handler does.

    Python itself swallows what a finalizer raises, and generators have one. So these are not counted.
    """
    count, before = 0, sys.gettrace()

    def called(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        if frame.f_code.co_flags & inspect.CO_GENERATOR or frame.f_code.co_name in ("__del__", "remove", "_remove"):
            return
        count += 1
        if count == at:
            HANDLER(0, frame)

    sys.settrace(called)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def model(body: str, inputs: str = "float[1, 4, 8, 8] x", outputs: str = "float[N, C, H, W] y") -> bytes:
    parser = pytest.importorskip("onnx.parser")
    head = '<ir_version: 8, opset_import: ["": 17]>'
    made = parser.parse_model(f"{head} g ({inputs}) => ({outputs}) {{ {body} }}")
    return made.SerializeToString()


WORK: dict[str, str] = {
    "convolutions": """
        s = Constant<value = float[4, 4, 1, 1] {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}>()
        a = Conv(x, s)  b = Relu(a)  y = MaxPool<kernel_shape = [2, 2]>(b)
    """,
    "constants that ONNX computes": """
        c = Constant<value = int64[3] {1, 2, 3}>()  d = Cast<to = 1>(c)  e = ReduceSum(d)  f = Det(d2)
        d2 = Constant<value = float[2, 2] {1, 2, 3, 4}>()  g = Add(e, f)  y = Mul(x, g)
    """,
    "foreign ops": "a = Relu(x)  b = Det(a)  y = Neg(b)",
    "shapes that depend on data": "a = Relu(x)  y = NonZero(a)",
    "a broken model": "a = Constant<value = int64[3] {1, 2, 3}>()  y = Reshape(x, a)",
}


def work_of(body: str) -> Callable[[], Any]:
    held, x = model(body), np.ones((1, 4, 8, 8), np.float32)

    def work() -> None:
        try:
            bc.compile(bc.load_onnx(held), threads=1)(x)
        except bc.NetworkError:
            assert "Reshape" in body

    return work


def contexts_of(error: BaseException) -> Iterator[BaseException]:
    """The exceptions that this one was raised from, or that were handled then."""
    while found := error.__cause__ or error.__context__:
        error = found
        yield error


def taken_by(error: BaseException) -> str:
    """The file whose code took an exception: a traceback begins where it was taken."""
    assert error.__traceback__ is not None
    return error.__traceback__.tb_frame.f_code.co_filename


def check(work: Callable[[], Any], points: int) -> None:
    """Each of so many calls is interrupted once. Python and other libraries swallow a few, blockconv none."""
    work()
    count = calls(work)
    step = max(1, count // points)
    told, lost = 0, []
    for at in range(1 + count % step, count, step):
        HANDLER.raised = LIMITS[at % len(LIMITS)]("a limit")
        try:
            made = calls(work, at)
        except Exception as error:
            if error is HANDLER.raised:
                told += 1
                continue
            # Python's zipfile takes any OSError as the sign of a file that is no zip file; codecs raise another one.
            if HANDLER.raised not in contexts_of(error):
                raise
        else:  # a later run may make fewer calls: what it needs is at hand
            if made < at:
                continue
        if Path(taken_by(HANDLER.raised)).is_relative_to(PACKAGE):
            lost.append(at)
    assert not lost, f"calls {lost} of {count} were interrupted, and no one was told"
    assert told > points // 2
    work()


POINTS = [12, pytest.param(100, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("body", WORK.values(), ids=WORK)
@pytest.mark.parametrize("points", POINTS)
def test_the_very_exception_comes_out_of_loading_and_compiling(body: str, points: int, handled: None) -> None:
    check(work_of(body), points)


@pytest.mark.parametrize("points", POINTS)
def test_the_very_exception_comes_out_of_files(points: int, tmp_path: Path, handled: None) -> None:
    b = bc.NetworkBuilder()
    b.output(b.max_pool2d(b.input("x", (1, 4, 8, 8)), 2))
    plan, array = bc.compile(b.build(), threads=1), bc.to_layout(np.ones((1, 4, 8, 8), np.float32), "NCHW4")

    def work() -> None:
        plan.save(tmp_path / "plan")
        bc.Plan.load(tmp_path / "plan")
        array.save(tmp_path / "array")
        bc.BlockedArray.load(tmp_path / "array")

    check(work, points)
