"""The problems that every convolution kernel is tried on, and the pairs of layouts for each.

Chosen so that few specialisations have to be compiled: kernels differ by the class of a layout (how many
channels lie together), so a problem is tried on all pairs of a few classes, and eight problems in a row cover
all sixteen pairs of classes.
"""

from __future__ import annotations

from conv_lab import NAMES, PAIRS

# Each on all 64 pairs: ragged everything; groups that fill no block; flat 1x1 with a tail of one channel.
WHOLE = (
    "mb2ic17ih13iw14oc33kh3kw3ph1pw1",
    "g3mb1ic12ih5iw7oc18kh3kw3ph1pw1",
    "mb2ic5ih7oc65kh1",
)

# Each on a quarter or an eighth of the pairs.
SAMPLED = (
    "mb1ic3ih30oc64kh7sh2ph3",  # a first layer
    "mb1ic1ih17iw29oc1kh5kw5ph2pw2",  # one channel
    "mb1ic4ih30oc9kh11sh3",
    "mb3ic8ih1iw5oc3kh1kw3pw1",  # one row
    "mb1ic9ih2oc4kh3ph1",  # every window over an edge
    "mb3ic16ih7oc48kh1",  # three vectors of 16
    "mb1ic31ih5iw7oc100kh1kw7ph0pw3",
    "mb2ic33ih5iw7oc15kh7kw1ph3pw0",
    "mb5ic64ih7oc64kh3ph1",  # four vectors of 16
    "mb1ic1000ih1oc17kh1",
    "mb1ic17ih1oc1000kh1",
    "mb1ic15ih14iw14oc31kh3kw3sh2sw1ph1pw1",  # strides that differ
    "mb1ic5ih17iw29oc8kh3kw3ph1pw2dh1dw2",  # dilations (2, 3)
    "mb1ic9ih7oc16kh1ph1",  # 1x1 over padding
    "mb2ic16ih14oc5kh1sh2",  # 1x1 with a stride
    "mb1ic8ih13oh14oc17kh4ph2",  # an even kernel, 2 above and 2 below
    "mb1ic4ih13iw14oh7ow6oc33kh3kw2sh2sw3ph2pw1",  # padding that differs on all sides
    "g16mb1ic16ih14oc16kh3ph1",  # depthwise
    "g5mb1ic5ih7oc15kh3ph1",  # depthwise, three outputs a channel
    "g2mb2ic6ih7oc34kh1",  # a group ends inside every block
    "g4mb1ic32ih7oc64kh3ph1",  # groups of whole blocks
    "g2mb1ic4ih2oc96kh1",  # a group of three vectors: the second begins inside a block of 32 or 64
    "g2mb1ic16ih1iw5oc160kh1kw3pw1",
    "mb1ic5ih2oc9kh5ph2",  # a kernel larger than the map
    "mb2ic5ih14oc16kh2sh3",  # a stride that leaves out rows
    "mb1ic4ih7oc4kh3ph3dh2",  # taps that fall off on both sides
    "mb1ic9ih20oh9oc16kh3sh2ph0",  # rows at the end that nothing reads
    "mb5ic3ih1iw5oc65kh1kw1",
)

# Groups that share a vector, on as many pairs as those.
GROUPED = (
    "g5mb2ic20ih6iw9oc20kh3kw3ph1pw1",  # 4 channels a group, the last vector not full
    "g3mb1ic24ih9oc24kh3sh2ph1",  # 8
    "g9mb1ic18ih5iw21oc18kh3kw3ph1pw1",  # 2
    "g6mb1ic48ih5iw7oc24kh1kw3ph0pw1",  # 8 to 4: source channels of two vectors
    "g7mb1ic21ih7oc21kh3ph2dh1",  # 3, in no block, with dilation
    "g18mb1ic72ih5oc18kh3ph1",  # 4 to 1: of four vectors
    "g5mb3ic25ih4iw6oc35kh2kw5ph1pw2",  # 5 to 7
    "g10mb2ic40ih7oc40kh1",  # flat
    "g3mb2ic66ih5iw9oc57kh3kw3ph1pw1",  # of blocks of the source and parts of others
    "g2mb2ic4ih12iw18oc2kh3kw1sh2sw2ph1pw0",  # one column, whose stride the packed window takes out
    "g6mb1ic24ih4iw19oc24kh1kw9ph0pw4",  # a row of taps too long to load a pixel for all of it
)

# Batches, which lie together in CHWN4: each from there to every layout, and from others to there.
BATCHES = (
    "mb17ic5ih5oc20kh3ph1",
    "mb33ic6ih4oc9kh3sh2ph1",
    "g2mb3ic10ih7oc12kh3ph2dh1",
    "mb5ic17ih5iw6oc33kh1kw1",
    "mb18ic4ih6iw5oc8kh1kw5pw2",
    "g5mb17ic20ih5oc20kh3ph1",
)

# In layouts in which the pixels of a row, or the images of a pixel, lie together.
ALONG_PIXELS = (
    "mb1ic17ih13iw11oc33kh1kw1",
    "mb2ic6ih7oc65kh1",
    "g3mb2ic21ih5iw9oc30kh1kw1",  # a group ends inside a tile's channels
    "mb1ic3ih4oc1kh1",  # one vector of pixels, one channel
    "mb19ic6ih3iw2oc10kh1kw1",  # vectors of images
    "mb35ic4ih2iw3oc9kh1kw1",
    "mb1ic40ih20oc50kh1",  # several panels
    "mb2ic7ih6iw18oc20kh1kw1",
    "g2mb17ic18ih4iw5oc26kh1kw1",
    "mb1ic6ih21oc9kh1sh2",  # flat where the destination is: panels are parts of rows
    "g3mb1ic6ih7iw35oc9kh3kw3sh2sw2ph1pw1",
    "mb1ic3ih5iw50oc6kh3kw5sh1sw3ph1pw4dh0dw1",  # taps of every phase, not in order
    "mb19ic3ih5oc6kh3sh2ph1",  # taps along h are levels
)
PLANES = ("NCHW", "bcda", "cdba", "acbd", "cbda")  # NCHW, CHWN, HWCN, NHCW, HCWN

GRID = WHOLE + SAMPLED + GROUPED + BATCHES

# These few again as another machine (marker `isa`, see .ci/run).
AS_OTHERS = (WHOLE[1], SAMPLED[0], SAMPLED[9], SAMPLED[21], GROUPED[2], GROUPED[-2], BATCHES[0])

# A third of the rest where tests may take long, as each problem compiles kernels of its own.
SLOW = tuple(d for k, d in enumerate(GRID) if k % 3 == 2 and d not in (*WHOLE, *AS_OTHERS))

CLASSES = (("NCHW",), ("NCHW4", "CHWN4"), ("NCHW8",), ("NHWC", "NCHW16", "NCHW32", "NCHW64"))
assert sorted(sum(CLASSES, ())) == sorted(NAMES)
_CLASS = {name: k for k, names in enumerate(CLASSES) for name in names}


def pairs(descriptor: str) -> tuple[tuple[str, str], ...]:
    """The pairs of layouts for a problem."""
    if descriptor in ALONG_PIXELS:
        return tuple((src, dst) for src in PLANES for dst in PLANES)
    if descriptor in WHOLE:
        return PAIRS
    if descriptor in BATCHES:
        return (*(("CHWN4", dst) for dst in NAMES), ("NHWC", "CHWN4"), ("NCHW", "CHWN4"))
    shift = (SAMPLED + GROUPED).index(descriptor)
    half = shift // 4 % 2
    sources = ((0, 3), (1, 2))[half]
    return tuple(
        (src, dst) for src, dst in PAIRS if _CLASS[src] in sources and (_CLASS[dst] - _CLASS[src] - shift) % 4 == 0
    )
