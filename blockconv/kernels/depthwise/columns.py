"""The columns of a tile of whole rows: what each element of the destination reads of the source."""

from dataclasses import dataclass

from blockconv.kernels.common.unpacked import PARTS, UNIT

MOST_WEIGHTS = 10  # that are held, of 32 registers, so that a row is read once for all phases


Edge = tuple[int, int]  # rows that a tile reaches over the image's first and last one


@dataclass(frozen=True)
class Columns:
    """The columns of a row, and the rows that tiles of whole rows reach over the image.

    src, dst: elements of a row.
    pixel: elements of a pixel.
    taps, stride, dilation, pad: in pixels.
    src_row, dst_row, tap: bytes from a row to the next, and from the weights of a tap to those of the next.
    begin, end: rows that the first tile and the last reach over the image.
    alone: 1, there is one tile.
    """

    src: int
    dst: int
    pixel: int
    taps: int
    stride: int
    dilation: int
    pad: int
    src_row: int = 0
    dst_row: int = 0
    tap: int = 0
    begin: int = 0
    end: int = 0
    alone: int = 1

    def element(self, output: int, tap: int) -> int | None:
        """The element of the source that an element of the destination reads at a tap; None: it is padding.

        Past the end of the destination's row, it is the element that the output would read.
        """
        pixel, inside = divmod(output, self.pixel)
        at = (pixel * self.stride + tap * self.dilation - self.pad) * self.pixel
        return at + inside if output >= self.dst or 0 <= at < self.src else None

    def row_lanes(self, lanes: int) -> int:
        """Lanes of a row, where rows follow one another in vectors of so many: it begins a vector, or shares it."""
        if self.dst > lanes:
            return -(-self.dst // lanes) * lanes
        return max(UNIT // PARTS, 1 << (self.dst - 1).bit_length())

    def vectors(self, rows: int, lanes: int) -> int:
        """Vectors of so many such rows."""
        return -(-rows * self.row_lanes(lanes) // lanes)

    def phase(self, tap: int) -> int:
        """The pixel that a tap reads, among the pixels that a stride steps over."""
        return (tap * self.dilation - self.pad) % self.stride

    def phase_vectors(self, lanes: int) -> int:
        """Vectors of so many elements that hold the pixels of a phase."""
        pixels = -(-self.src // (self.stride * self.pixel))
        return -(-pixels * self.pixel // lanes)

    def phase_elements(self, phase: int, k: int, lanes: int) -> list[int]:
        """The elements of vector `k` of the pixels of a phase."""
        outputs = (divmod(k * lanes + lane, self.pixel) for lane in range(lanes))
        return [(number * self.stride + phase) * self.pixel + inside for number, inside in outputs]

    def groups(self, rows: int, lanes: int, registers: int) -> list[list[int]]:
        """Taps that are reduced at once, in order, where each has weights for so many rows.

        All taps are, where there are registers for their weights, so that a row with a stride is read once. Else the
        taps of one phase are, whose pixels are shuffled once, where a row is more vectors than a shuffle takes.
        """
        several = self.stride > 1 and self.taps * rows <= (MOST_WEIGHTS if registers == 32 else 0)
        if not several and (self.stride == 1 or self.src <= 2 * lanes):
            return [[tap] for tap in range(self.taps)]
        phases: dict[int, list[int]] = {}  # a stride may have any number of phases that no tap has
        for tap in range(self.taps):
            phases.setdefault(self.phase(tap), []).append(tap)
        found = [phases[phase] for phase in sorted(phases)]
        return [[tap for taps in found for tap in taps]] if several else found


ANY_COLUMNS = Columns(*[0] * 7)  # of rows that are not whole in tiles
