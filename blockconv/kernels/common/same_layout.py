"""Requirements on layouts by ops whose destination has the source's layout."""

from blockconv.kernels.common.request import Reason, Request


def same_layout_why_not(request: Request, tails: tuple[int, ...] = (1,)) -> Reason | None:
    """None for two equal layouts with at most one block of channels, the innermost, and only it cut; else a sentence.

    tails: the dimensions whose last block may have a tail. Blocks of others have to divide the problem's `dst_shape`:
    then they are dimensions like others.
    """
    shape, src, dst = request.problem.dst_shape, request.src, request.dst
    if src != dst:
        return "does not change the layout"
    if dst.ndim != len(shape):
        return f"{dst} has {dst.ndim} dimensions, and the problem has {len(shape)}"
    channels = [k for k, (dim, _) in enumerate(reversed(dst.inner)) if dim == 1]
    if dst.is_blocked and channels != [0] and not dst.is_native:
        return f"needs one block of channels, the innermost, unlike {dst}"
    whole = dst.padded_shape(shape)
    if any(shape[dim] != whole[dim] for dim in range(dst.ndim) if dim not in tails):
        return f"only channels may end in a partial block, unlike {shape} in {dst}"
    return None
