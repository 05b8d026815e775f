"""Functions of Python, with the arguments that this library always gives them."""

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    zipped = zip
else:
    # `zip`, which raises ValueError unless all iterables are equally long.
    zipped = functools.partial(zip, strict=True)

# Decorator that keeps a function's last results, for as many problems as a process meets.
bounded_cache = functools.lru_cache(maxsize=4096)
