"""The buffers of a convolution, by number."""

from blockconv.runtime import Buffer

SRC, WEI, BIA, DST, RES, ACT = (Buffer(k) for k in range(6))
