"""The files beside a model that hold values of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from blockconv.core.errors import NetworkError


class Files:
    """The files that a model may name, which is at `path`; none, if it was not given by a path.

    Symbolic links are followed. Then a file has to be in the folder of the model's path, or in the folder where the
    model's own links end. The second serves the cache of Hugging Face, where each file is a link to one named by its
    contents.
    """

    def __init__(self, path: str | None) -> None:
        self._at = None if path is None else Path(path)

    def hold(self, tensor: Any) -> bool:
        """Whether the values of a tensor are in another file that can be looked for."""
        return self._at is not None and tensor.data_location == TensorProto.EXTERNAL

    def read(self, tensor: Any, where: str) -> npt.NDArray[np.uint8]:
        """The bytes of its values. Raises NetworkError, which names the tensor as `where`."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        try:
            file = self._file(entries.get("location", ""))
            size = file.stat().st_size
            offset = _whole("offset", entries, 0)
            length = _whole("length", entries, size - offset)
            if not 0 <= offset <= offset + length <= size:
                raise ValueError(f"{length} bytes from offset {offset} are not inside its {size} bytes")
            return np.fromfile(file, np.uint8, length, offset=offset)
        except (OSError, ValueError) as error:
            rule = f"has values in another file that cannot be read: {error}"
            remedy = "put the complete file into the model's folder, or export the model as one file"
            raise NetworkError(where, "external_data", entries, rule, remedy) from error

    def _file(self, location: str) -> Path:
        """The real path of a file. Raises ValueError for a file that a model may not name."""
        assert self._at is not None
        if not location:
            raise ValueError("it has no location")
        if Path(location).is_absolute():
            raise ValueError("its location has to be relative to the model's folder")
        given = self._at.parent / location
        found, folder = given.resolve(), self._at.parent.resolve()
        other = self._at.resolve().parent
        if not (found.is_relative_to(folder) or found.is_relative_to(other)):
            also = f", or {other}, where the model's own link ends" if other != folder else ""
            link = f"is a link to {found}" if given.is_symlink() else f"is {found}"
            raise ValueError(f"it {link}, and has to be in {folder}, the model's folder{also}")
        if not found.is_file():
            raise ValueError(f"{found} is no file" if found.exists() else f"the file {found} does not exist")
        return found


def _whole(key: str, entries: dict[str, str], default: int) -> int:
    if not entries.get(key, "0").isdecimal():
        raise ValueError(f"its {key}, {entries[key]!r}, has to be a whole number of at least 0")
    return int(entries.get(key, default))
