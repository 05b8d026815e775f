"""scipy's tests of its filters, which its package has, with blockconv's functions in place of scipy's.

`python tests/filters/test_scipys_own_tests.py` runs them, and prints how many calls went to scipy.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

FILES = ("scipy.ndimage.tests.test_filters", "scipy.ndimage.tests.test_morphology")
# A third of the calls have complex numbers, others uint64, a structure or wrong arguments.
MOST_OF_SCIPYS = 0.5


def run() -> tuple[int, dict[str, int]]:
    """pytest's status, and the number of calls."""
    import scipy.ndimage
    from scipy._lib._array_api import xp_capabilities_table  # by which scipy's decorators of tests look up a function

    from blockconv import ndimage

    count = {"all": 0, "scipy": 0}
    given = {name: getattr(scipy.ndimage, name) for name in ndimage.__all__}

    def warned(why: str) -> None:
        """Is called at each call of scipy's compiled code."""
        count["scipy"] += 1

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count["all"] += 1
            return function(*args, **kwargs)

        call.__name__ = function.__name__
        return call

    ndimage._warn = warned
    for name in ndimage.__all__:
        own = counted(getattr(ndimage, name))
        xp_capabilities_table[own] = xp_capabilities_table[given[name]]
        setattr(scipy.ndimage, name, own)
    # A compilation may take longer than what scipy allows an example of hypothesis.
    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "-W", "ignore::blockconv.SlowPathWarning"]
    chosen = ["-k", "not (distance or binary or white or black or morphological or gh_22586_crash)"]
    return int(pytest.main([*options, *chosen, "--pyargs", *FILES])), count


@pytest.mark.slow
def test_scipys_own_tests_pass(run_python: Any) -> None:
    pytest.importorskip("scipy._lib._array_api")
    done = run_python([__file__], timeout=1800)
    last = done.stdout.splitlines()[-1]
    print(last)
    own, everything = (int(word) for word in last.split() if word.isdigit())
    assert own < MOST_OF_SCIPYS * everything, last


if __name__ == "__main__":
    status, calls = run()
    print(f"{calls['scipy']} of {calls['all']} calls went to scipy")
    sys.exit(status)
