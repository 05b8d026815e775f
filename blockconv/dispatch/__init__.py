"""One op on users' arrays: which kernel, its packed weights, the arrays in and out, and what was measured."""


def __getattr__(name: str) -> object:
    from blockconv._moved import moved_name

    return moved_name(__name__, name)
