"""Write a network to a file: `python -m bench.networks resnet50 model.onnx --batch 16`."""

from __future__ import annotations

import argparse
from pathlib import Path

import onnx

from blockconv.cli.arguments import Parser

from .. import networks


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = Parser("python -m bench.networks", description=networks.__doc__, formatter_class=how)
    parser.add_argument("name", choices=networks.NETWORKS)
    parser.add_argument("path", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    onnx.save(networks.build(options.name, options.batch, options.seed), options.path)


if __name__ == "__main__":
    main()
