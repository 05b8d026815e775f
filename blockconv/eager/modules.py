"""The classes of converted modules, where pickles from before 0.2.0 name them."""

from __future__ import annotations

from blockconv.torch import AdaptiveAvgPool2d as AdaptiveAvgPool2d
from blockconv.torch import AvgPool2d as AvgPool2d
from blockconv.torch import Conv1d as Conv1d
from blockconv.torch import Conv2d as Conv2d
from blockconv.torch import ConvTranspose1d as ConvTranspose1d
from blockconv.torch import ConvTranspose2d as ConvTranspose2d
from blockconv.torch import MaxPool2d as MaxPool2d
