"""The commands of `python -m bench`: a module each, with `add_arguments(command)` and `run(options, console)`.

A module is imported only when its command is requested, as some need packages that others do without.
"""

__all__ = ["COMMANDS"]

COMMANDS = {
    "layers": "convolution layers, in every layout, beside the peers",
    "nets": "whole networks, planned in several ways, beside the peers",
    "cold": "what a process costs before its first answer: CPU seconds and compiled kernels",
    "sizes": "networks at sizes that were not planned: what a first call costs, and the speed",
    "graphs": "real networks of a collection (GraphNet): what loads, is right, and how fast",
    "lab": "what layouts matter in networks, how well they are chosen, break-even",
    "reorders": "changes of layout, beside torch and a copy",
    "launcher": "what a plan costs between its ops",
    "tables": "result files as Markdown; of none, all pages that show results",
    "page": "result files as one HTML page with plots",
    "pools": "pooling, in every layout, beside the peers and a copy",
    "images": "filters of images, beside scipy, OpenCV, scikit-image",
    "costs": "what rows predict beside what they take, and what choices cost",
    "scaling": "what more cores are predicted to gain, and what these do",
    "modules": "PyTorch modules, with torch.nn.functional.conv2d replaced by ours",
    "train": "steps of training in PyTorch: eager, Inductor and ours; time and peak memory",
    "tiles": "a large image by tiles, on Dask's workers, and planned for many machines",
    "mixed": "convolutions in turns with PyTorch's operations, for each pool",
    "export": "result files as one CSV table, a row for each time",
    "compare": "two result files; the status is 1 if anything got slower",
    "pairs": "two trees of sources in turns: what a change of the code does to speed",
    "manifest": "rows, blockings, assembly and bits of every case; what changed",
    "machine": "this machine's record and what it can do at most",
}
