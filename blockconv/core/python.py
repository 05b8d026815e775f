"""Python's own functions, with the arguments that this library gives them everywhere."""

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    zipped = zip
else:
    # The elements of iterables side by side. Raises ValueError unless all are equally long.
    zipped = functools.partial(zip, strict=True)

# Decorator of a function whose last results are kept: of as many problems as a process meets.
bounded_cache = functools.lru_cache(maxsize=4096)
