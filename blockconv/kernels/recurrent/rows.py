"""LSTM and GRU layers after the products of their inputs, over all steps of a sequence.

A step needs the one before, so a task computes all steps of a few images in one direction. Each step reads the weights
once for all images of a task, from the second-level cache. A block of `COLUMNS` columns is contiguous.

Buffers: source, first states, weights, biases, the weights of reset hidden values (if a GRU resets these, and not
sums), destination. Weights and biases have the computed type.
"""

from blockconv.core.checks import Pair
from blockconv.core.eltwise_problem import COLUMNS, RecurrentProblem
from blockconv.core.types import FLOATS
from blockconv.kernels.common.request import Request
from blockconv.kernels.recurrent.kernels import RecurrentArgs, recurrent
from blockconv.kernels.table import same_layout_row
from blockconv.runtime import Buffer, Launch

IMAGES = 4  # of a task at most: a weight is loaded once for all


def _blocks(problem: RecurrentProblem) -> Pair:
    """Blocks of columns of both weights."""
    first, second = ((count * problem.hidden + COLUMNS - 1) // COLUMNS for count in problem.columns)
    return first, second


def _groups(problem: RecurrentProblem, threads: int) -> Pair:
    """The number of groups, and the images of a group. Groups are smaller where threads would lack tasks."""
    groups = max(-(-problem.batch // IMAGES), min(problem.batch, -(-threads // len(problem.reverse))))
    images = -(-problem.batch // groups)
    return -(-problem.batch // images), images


def _launches(request: Request) -> list[Launch]:
    p, kind = request.problem, request.types.src
    if not p.batch:
        return []
    (groups, images), (blocks, others) = _groups(p, request.threads), _blocks(p)
    args = RecurrentArgs(
        states=Buffer(1),
        weight=Buffer(2),
        bias=Buffer(3),
        other=Buffer(4),
        dst=Buffer(5 if others else 4),
        steps=p.steps,
        batch=p.batch,
        groups=groups,
        directions=len(p.reverse),
        reverse=sum(1 << k for k, flag in enumerate(p.reverse) if flag),
        hidden=p.hidden,
        gates=p.gates,
        blocks=blocks,
        other_blocks=others,
    )
    lanes, held = request.machine.lanes(kind.computed.itemsize), kind.computed.itemsize
    kernel = recurrent(kind, lanes, p.kind == "lstm", p.kind == "gru_of_sums", images)
    scratch = images * (2 * p.hidden + (blocks + others) * COLUMNS) * held
    return [Launch(kernel, args, groups * len(p.reverse), 1, scratch=scratch)]


def _cost(request: Request) -> float:
    p, m, held = request.problem, request.machine, request.types.src.computed.itemsize
    if not p.batch:
        return m.launch_seconds()
    (groups, images), columns = _groups(p, request.threads), sum(_blocks(p)) * COLUMNS
    tasks = groups * len(p.reverse)
    computed = images * p.hidden * columns / m.lanes(held) * m.fma_seconds(m.lanes(held), held)
    step = max(computed, m.move_seconds(p.hidden * columns * held, p.hidden * held))
    return m.launch_seconds() + p.steps * step * -(-tasks // min(request.threads, tasks))


ROWS = (same_layout_row("recurrent", "recurrent", FLOATS, _cost, _launches),)
