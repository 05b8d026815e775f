"""Ops between 3-D convolutions and pools run on the images of volumes: see `network.volumes`."""

from collections.abc import Sequence
from dataclasses import replace

from blockconv.core.checks import Shape, of_rank
from blockconv.network.graph import Node
from blockconv.network.ops import Activate, Affine, Binary, Cast, Concat, Dequantize, Op, Quantize, Reshape, Transpose
from blockconv.network.passes.rewrite import Edit, rule
from blockconv.network.volumes import TO_VOLUME

_OF_IMAGES = {1: 1, 2: 0, 3: 2, 4: 3}  # an axis of a volume, and the axis of its images


def _on_images(edit: Edit, node: Node) -> bool:
    """Move an op of each element or channel, or a concatenation, from volumes to the images that they were made of.

    Then it follows the op that computes the images, and can be fused into that op.
    """
    a, inputs = node.attributes, list(node.inputs)
    before = {name: edit.producer(name, Transpose) for name in inputs if name not in edit.constants}
    slices = {name: one.src for name, one in before.items() if one and one.attributes.perm == TO_VOLUME}
    whole = edit.shape(node.output)
    if (
        not slices
        or len(slices) < len(before)
        or 0 in whole
        or not _runs_on_images(a, [*map(edit.shape, slices.values())])
    ):
        return False
    new = []
    for k, name in enumerate(inputs):
        if name in slices:
            d, n, *image = edit.shape(slices[name])
            inputs[k] = edit.value_name(f"{node.output}.images{k}")
            new.append(Node(f"{node.name}.images", Reshape((d * n, *image)), (slices[name],), inputs[k]))
        else:
            wide = of_rank(edit.constants[name].shape, 5)
            if len(wide) > 5 or wide[0] > 1 or wide[2] > 1 or not isinstance(a, Binary):
                return False
            inputs[k] = edit.constant(f"{node.name}.images{k}", edit.constants[name].reshape(1, wide[1], *wide[3:]))
    value, split = (edit.value_name(f"{node.output}.{word}") for word in ("flat", "slices"))
    made = replace(a, axis=_OF_IMAGES[a.axis]) if isinstance(a, Concat) else a
    n, c, d, *image = whole
    new += [
        replace(node, attributes=made, inputs=tuple(inputs), output=value),
        Node(f"{node.name}.slices", Reshape((d, n, c, *image)), (value,), split),
        Node(f"{node.name}.volume", Transpose(TO_VOLUME), (split,), node.output),
    ]
    return edit.replace((node,), *new)


def _runs_on_images(a: Op, shapes: Sequence[Shape]) -> bool:
    """Whether an op of volumes is the same op of their images. shapes: (D, N, C, H, W), of their slices."""
    depths, images = ({shape[axis] for shape in shapes} for axis in (0, 1))
    if isinstance(a, Concat):
        return a.axis == 2 or (a.axis in _OF_IMAGES and len(depths) == 1)
    if isinstance(a, (Quantize, Dequantize)):
        return (a.dst if isinstance(a, Quantize) else a.src).scale.ndim == 0
    if isinstance(a, Binary):  # with one volume, one slice broadcasts as one image
        return len(images) == 1 and (len(depths) == 1 or images == {1})
    return isinstance(a, (Activate, Affine, Cast))


@rule
def _unread(edit: Edit, node: Node, a: Reshape | Transpose) -> bool:
    """Delete an op whose output nothing reads: then the images have one reader, which can be fused with them."""
    return not edit.reads(node.output) and edit.replace((node,))


VOLUMES = (_unread, _on_images)
