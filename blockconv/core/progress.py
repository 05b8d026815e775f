"""Progress of long work: a bar on a terminal, and lines elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from blockconv.core import text
from blockconv.core.errors import ignoring

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


FIRST, NEXT, REFRESH = 2.0, 10.0, 0.1  # seconds before anything is said, between lines, between a bar's changes
MOST_STEPS = 10_000  # that a line counts; of more it says the share
LOGGER = logging.getLogger("blockconv")
SOLE_BAR = threading.Lock()  # whoever shows a bar holds it: a terminal has one


class Progress:
    """Work that says how far it is: after `FIRST` seconds a bar, or a line each `NEXT` seconds and a last one.

    what: the work, such as "compiling kernels".
    total: the number of its steps. None if it is not known: then there are only lines, and no last one.
    note: what the first line adds.
    begun: when it began, by `time.perf_counter`. The default is now.
    is_long: it is known to take long, so the first `tick` is told.

    A bar needs a terminal on the error stream. Lines go to the logger "blockconv", as INFO, if the program has set up
    logging, else to the error stream. A level above INFO of this logger silences both.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        note: str = "",
        begun: float | None = None,
        is_long: bool = False,
    ) -> None:
        self._what, self._total, self._note = what, total, note
        self._begun = time.perf_counter() if begun is None else begun
        self._due = self._begun + (0.0 if is_long else FIRST)
        self._bar: Bar | None = None
        self._says_lines = False

    def tick(self, done: int | Callable[[], int], doing: str = "") -> None:
        """So many steps are done. `done` is a function if it takes time to find out. doing: the step in progress."""
        now = time.perf_counter()
        if now < self._due or LOGGER.level > logging.INFO:
            return
        with ignoring():
            self._show(done() if callable(done) else done, doing, now)

    def _show(self, count: int, doing: str, now: float) -> None:
        if self._bar is None and not self._says_lines and self._total is not None and text.is_terminal():
            self._bar = self._started()
        if self._bar is not None:
            self._due = now + REFRESH
            self._bar.update(self._bar.task_ids[0], completed=count, description=doing, refresh=True)
            return
        of = "" if self._total is None else f" of {self._total}"
        if self._total is not None and self._total > MOST_STEPS:
            count, of = 100 * count // self._total, " %"
        note = "" if self._says_lines or not self._note else f"; {self._note}"
        self._says_lines, self._due = True, now + NEXT
        _say(f"{self._what}: {count}{of} after {now - self._begun:.0f} s{note}")

    def _started(self) -> Bar | None:
        """A bar on the terminal; None if there is another."""
        if not SOLE_BAR.acquire(blocking=False):
            return None
        from rich import progress

        columns = progress.TextColumn(f"{self._what} {{task.description}}", markup=False), progress.BarColumn()
        counts = progress.MofNCompleteColumn(), progress.TimeElapsedColumn()
        console = text.console(stderr=True)
        bar = progress.Progress(*columns, *counts, console=console, transient=True, auto_refresh=False)
        bar.add_task("", total=self._total)
        bar.start()
        return bar

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        with ignoring():
            if self._bar is not None:
                try:
                    self._bar.stop()
                finally:
                    SOLE_BAR.release()
            elif self._says_lines:
                seconds = time.perf_counter() - self._begun
                _say(f"{self._what}: {'stopped' if error else 'finished'} after {seconds:.0f} s")
        self._bar = None


def _say(line: str) -> None:
    if LOGGER.hasHandlers():
        LOGGER.info(line)
    elif sys.stderr is not None:
        print(f"blockconv: {line}", file=sys.stderr, flush=True)
