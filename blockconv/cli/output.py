"""Where a command's output goes: results on the standard output, errors and progress on the error stream, a status."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from blockconv.core import text
from blockconv.core.errors import BlockconvError, ignoring
from blockconv.core.progress import SOLE_BAR

FAILED, CLOSED, INTERRUPTED = 2, 1, 130  # exit statuses: an error; nobody reads the output; Ctrl-C
PLAIN = {"→": ">", "─": "-", "━": "-", "│": "|", "µ": "u", "…": "~", "·": "."}
ENCODER = "blockconv.plain"


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Characters that an encoding does not have, each as one that ASCII has, so that columns stay where they are."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(PLAIN.get(character, "?") for character in error.object[error.start : error.end]), error.end


codecs.register_error(ENCODER, _plain)


def run(command: Callable[[Console], int]) -> int:
    """Run a command on the console of the standard output; returns the exit status.

    An error is one line on the error stream, and status 2. A pipe that its reader closed ends the command with status 1
    and no text. Both streams take any text, whatever their encoding.
    """
    with _open("stdout"), _open("stderr"):
        try:
            try:
                console = text.console()
                return command(console if console.is_terminal else text.console(width=140))
            finally:
                sys.stdout.flush()  # which is where a full disk shows
        except BrokenPipeError:
            return CLOSED
        except KeyboardInterrupt:
            return INTERRUPTED
        except (BlockconvError, OSError) as error:
            with ignoring(OSError):
                text.console(stderr=True).print(f"error: {error}", style="bold red", soft_wrap=True)
            return FAILED


@contextlib.contextmanager
def _open(name: str) -> Iterator[None]:
    """A standard stream that takes any text; one that was closed, or cannot take what it holds, takes the rest away."""
    if getattr(sys, name) is None:  # the process began with it closed
        setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    stream = getattr(sys, name)
    errors = getattr(stream, "errors", None)
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors=ENCODER)
    try:
        yield
    finally:
        try:
            stream.flush()
        except OSError:  # Python would say so with a traceback as it ends
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


# ---------------------------------------------------------------- progress


class Steps:
    """The steps of a command: on a terminal a line that moves and goes away, elsewhere a line for each as it begins.

    Lines begin with the seconds since the first step, and are written at once, so that a log shows what is going on.
    All goes to the standard error stream: what a command finds out is all that its output holds.
    """

    def __init__(self, total: int) -> None:
        self.console, self.total = text.console(stderr=True), total
        self._begun, self._start = 0, time.perf_counter()
        self._moving: Progress | None = None
        if text.is_terminal():
            columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
            self._moving = Progress(*columns, console=self.console, transient=True)
            self._task = self._moving.add_task("", total=total)

    def begin(self, what: str) -> None:
        """The next step; the one before is done."""
        if self._moving is not None:
            self._moving.update(self._task, description=what, completed=self._begun)
        else:
            seconds = time.perf_counter() - self._start
            line = f"{seconds:6.1f} s  {self._begun + 1} of {self.total}: {what}"
            self.console.print(line, soft_wrap=True)
        self._begun += 1

    def __enter__(self) -> Steps:
        if self._moving is not None:
            SOLE_BAR.acquire()
            self._moving.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._moving is not None:
            self._moving.stop()
            SOLE_BAR.release()
