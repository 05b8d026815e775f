"""dask-image's filters, by the kernels of `blockconv.ndimage`.

    import blockconv.dask_image

From then on the functions of `dask_image.ndfilters` filter chunks of NumPy arrays by the functions of
`blockconv.ndimage` of the same names. dask-image finds the border that a filter reads of neighbouring chunks. Import it
where graphs are made: workers need blockconv alone. Needs dask-image (pip install dask-image).
"""

from __future__ import annotations

import numpy as np

from blockconv import ndimage
from blockconv.core.errors import needing

with needing("blockconv.dask_image", "dask_image", "dask-image"):
    from dask_image.dispatch import _dispatch_ndfilters

for _name in ndimage.__all__:
    if _dispatcher := getattr(_dispatch_ndfilters, f"dispatch_{_name}", None):
        _dispatcher.register(np.ndarray, lambda *_, name=_name: getattr(ndimage, name))
