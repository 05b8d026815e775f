"""Arrays that the tests of conv2d's boundary share, and what PyTorch makes of them; it has to be there."""

from __future__ import annotations

import conv_oracle
import numpy as np
import pytest
from storage_oracle import places, stored

import blockconv as bc

torch = pytest.importorskip("torch")
F = torch.nn.functional

RNG = np.random.default_rng(7)
X = RNG.standard_normal((2, 6, 7, 9), np.float32)
W = RNG.standard_normal((8, 6, 3, 3), np.float32)
B = RNG.standard_normal(8, np.float32)
SHAPE = (2, 8, 7, 9)  # of the output with a padding of 1


def close(found, wanted, bound=1e-5):
    assert type(found) is type(wanted) or isinstance(found, np.ndarray)
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype
    assert conv_oracle.error(found, wanted) <= bound


def like_torch(x=X, w=W, *args, **options):
    tensors = [torch.from_numpy(np.ascontiguousarray(a)) if isinstance(a, np.ndarray) else a for a in (x, w, *args)]
    return F.conv2d(*tensors, **options).numpy()


WANTED = like_torch(X, W, B, padding=1)


def channels_last(array):
    """The same values with PyTorch's channels_last strides."""
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def blocked(array, layout, fill=np.nan):
    """In a layout, without the library's own reorder, with NaN in the padding."""
    layout = bc.Layout(layout)
    storage = stored(array, str(layout), fill).reshape(layout.storage_shape(array.shape))
    return bc.BlockedArray(storage, layout, array.shape)


def logical(x):
    return x.storage.reshape(-1)[places(str(x.layout), x.shape)[0]]


def read_only(array):
    array.flags.writeable = False
    return array


def unaligned(array):
    raw = np.empty(array.nbytes + 1, np.uint8)
    placed = np.ndarray(array.shape, array.dtype, raw.data, offset=1)
    placed[...] = array
    assert not placed.flags.aligned
    return placed


# From an array, one that is equal and lies otherwise.
STRIDED = {
    "every second row": lambda a: np.repeat(a, 2, axis=2)[:, :, ::2],
    "every second channel": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "cropped": lambda a: np.pad(a, ((0, 0), (1, 2), (2, 1), (1, 1)))[:, 1:-2, 2:-1, 1:-1],
    "backwards": lambda a: np.ascontiguousarray(a[::-1, ::-1, ::-1, ::-1])[::-1, ::-1, ::-1, ::-1],
    "columns backwards": lambda a: np.ascontiguousarray(a[..., ::-1])[..., ::-1],
    "rows and columns exchanged": lambda a: np.ascontiguousarray(a.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2),
    "Fortran order": np.asfortranarray,
    "channels last": channels_last,
    "channels last, cropped": lambda a: channels_last(np.pad(a, ((0, 0), (1, 1), (1, 1), (0, 0))))[:, 1:-1, 1:-1],
    "read-only": lambda a: read_only(a.copy()),
    "other byte order": lambda a: a.astype(a.dtype.newbyteorder()),
    "channels last, other byte order": lambda a: channels_last(a.astype(a.dtype.newbyteorder())),
    "unaligned": lambda a: unaligned(a),
}
