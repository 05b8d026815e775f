"""How many random cases a test that compiles kernels draws: all of them in `.ci/run nightly`, a quarter elsewhere."""

from __future__ import annotations

import os


def cases(most: int) -> int:
    """The number of cases of a test. `.ci/run nightly` sets BLOCKCONV_TEST_WHOLE, and runs `most`."""
    return most if os.environ.get("BLOCKCONV_TEST_WHOLE") else -(-most // 4)
