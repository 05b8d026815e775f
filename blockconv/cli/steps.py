"""Progress messages of a command."""

from __future__ import annotations

import time

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from blockconv.core import text
from blockconv.core.progress import SOLE_BAR


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
