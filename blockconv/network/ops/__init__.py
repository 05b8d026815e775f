"""The ops of a network: each is a frozen record, which holds everything that is known of the op.

A record has its attributes as fields. It infers the output's shape and type, and computes its meaning in NumPy. It
says what it does to integers, and what the planner requests from the kernel table (`rule`). It holds no sizes, so the
same record serves inputs of any size. Shapes are logical: (N, C, H, W) for four dimensions. Methods raise
ArgumentError for inputs that an op does not take.

Front ends translate into these ops, and passes rewrite within them. An op that a kernel can end with an activation has
the field `activation`; it is the identity unless fusion set it. The records of `quantized` say what their integers
stand for; other ops take integers as they are. A family exports what its `__all__` names.
"""

from blockconv.core.checks import Shape as Shape
from blockconv.core.problem import PoolKind as PoolKind
from blockconv.network.ops.axes import *  # noqa: F403
from blockconv.network.ops.base import Op as Op
from blockconv.network.ops.base import Solved as Solved
from blockconv.network.ops.dynamic import *  # noqa: F403
from blockconv.network.ops.elementwise import *  # noqa: F403
from blockconv.network.ops.foreign import *  # noqa: F403
from blockconv.network.ops.gradients import *  # noqa: F403
from blockconv.network.ops.indexed import *  # noqa: F403
from blockconv.network.ops.moves import *  # noqa: F403
from blockconv.network.ops.norm import *  # noqa: F403
from blockconv.network.ops.products import *  # noqa: F403
from blockconv.network.ops.quantized import *  # noqa: F403
from blockconv.network.ops.recurrent import *  # noqa: F403
from blockconv.network.ops.windows import *  # noqa: F403
