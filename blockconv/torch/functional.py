"""torch.nn.functional's convolutions and pools on blockconv's kernels: `import blockconv.torch.functional as F`."""

from __future__ import annotations

from blockconv.eager.functional import *  # noqa: F403
from blockconv.eager.functional import __all__ as __all__
