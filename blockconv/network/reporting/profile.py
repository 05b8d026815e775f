"""The measured and predicted times of a plan, for each call and for the whole plan.

The planner chooses by the cost on one thread, so that neither the choice nor any bit of a result depends on threads.
Predictions here are for the threads that ran: users want to know them, and they choose nothing.
"""

from typing import NamedTuple

from blockconv.core import text
from blockconv.core.python import zipped
from blockconv.network.planning.candidates import on_threads
from blockconv.network.planning.planned import Planned
from blockconv.network.planning.planner import Solution
from blockconv.network.schedule import Action


class Profile(NamedTuple):
    """The median seconds of each action of a plan, and of the whole plan; `print` shows a table.

    actions: the kernel calls, in the plan's order.
    seconds: the measured seconds of each, with a launch of about 3 µs.
    whole: the measured seconds of the plan in one native call, without these launches.
    predicted: the predicted seconds of each action.
    threads: the number of threads.
    """

    actions: tuple[Action, ...]
    seconds: tuple[float, ...]
    whole: float
    predicted: tuple[float, ...]
    threads: int

    def __str__(self) -> str:
        together = sum(self.seconds)
        rows = [
            (*call_cells(action), text.microseconds(guess), text.microseconds(seconds), f"{seconds / together:.1%}")
            for action, guess, seconds in zipped(self.actions, self.predicted, self.seconds)
        ]
        total = text.microseconds(sum(self.predicted)), text.microseconds(together), "100%"
        rows.append((f"{len(self.actions)} calls, one by one", "", "", *total))
        heads = (*CALL_HEADS, "predicted,\nµs", "measured,\nµs", "share")
        whole = f"The whole plan in one native call: {text.duration(self.whole)}"
        shown = text.table(heads, rows, right=(3, 4, 5), rules=[len(self.actions)])
        return f"{shown}\n\n{whole}, on {text.threads(self.threads)}."

    def __repr__(self) -> str:
        whole = f"whole={text.duration(self.whole)}"
        return f"Profile({len(self.actions)} calls, {whole}, one by one={text.duration(sum(self.seconds))})"


CALL_HEADS = "op", "kernel", "layouts"


def call_cells(action: Action) -> tuple[str, str, str]:
    """An action in the columns of CALL_HEADS; reorders and copies are named after the tensor that they move."""
    name = action.name if action.node is not None else f"{action.kind} {action.name}"
    kernel = text.shortened(action.kernel, 20)
    return text.shortened(name, 26), kernel, text.arrow(*action.layouts)


def seconds_of_plan(planned: Planned, solution: Solution, threads: int) -> float:
    """Seconds of a whole plan, its reorders included."""
    every = zipped(planned.candidates, solution.chosen)
    nodes = sum(on_threads(found[k], planned.threads, threads) for found, k in every)
    return nodes + sum(planned.problem.reorder(*copy) for copy in solution.reorders)


def seconds_of_actions(planned: Planned, actions: tuple[Action, ...], threads: int) -> tuple[float, ...]:
    """Predicted seconds of each action. A reorder takes the time of its memory, on any number of threads."""
    taken = {node.name: candidate for node, candidate in zipped(planned.network.nodes, planned.chosen)}

    def cost(a: Action) -> float:
        if a.node is None:
            return planned.problem.reorder(a.writes[0], *a.layouts)
        return a.cost if a.part else on_threads(taken[a.name], planned.threads, threads)

    return tuple(map(cost, actions))
