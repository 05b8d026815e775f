"""torch.nn.functional's convolutions and pools on blockconv's kernels: `import blockconv.torch.functional as F`."""

from __future__ import annotations

from blockconv.frontends.torch.functional import *  # noqa: F403
from blockconv.frontends.torch.functional import __all__ as __all__
