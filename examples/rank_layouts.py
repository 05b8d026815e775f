"""Rank assignments of layouts with a graph neural network, as TpuGraphs' baseline does, from the lab's npz files alone.

python examples/rank_layouts.py [FOLDER] [SECONDS]     needs PyTorch; SECONDS of training for each held-out part (20)

FOLDER is a set, or one of its runs: a machine with a type and a number of threads.

An assignment's score is a sum over the nodes of its graph, as a time is. A node's part depends on the op, the layouts
that it reads and writes, on its kernel, and on its neighbours' (GraphSAGE). It learns from pairs of assignments of one
network: the faster one has to have the smaller score. Networks of the held-out families are in no pair.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
WIDTH, LAYERS, PARTS = 64, 3, 3
FAMILIES = {  # of networks, by parts of their names; the first that fits
    "residual": "resne regnet gernet dla dpn hrnet",
    "mobile": "mobile efficientnet mnasnet fbnet hardcorenas mixnet lcnet ghostnet",
    "dense": "densenet rdnet vovnet hgnet",
    "detectors": "yolo darknet detector",
    "transformers": "vit deit swin coat next former mamba mixer fasternet starnet",
    **{name: name for name in ("shufflenet", "squeezenet", "inception", "unet", "vgg")},
}


def family(name):
    return next((of for of, parts in FAMILIES.items() if any(part in name for part in parts.split())), name)


class Graphs:
    """All networks of a set. Layouts, kernels and ops are numbered alike in all, 0 for none."""

    def __init__(self, folder):
        self.vocabulary = {"layouts": {}, "kernels": {}, "opcodes": {}}
        self.graphs = {}
        paths = sorted(folder.rglob("tpugraphs.npz"))
        several = len({path.parent.parent for path in paths}) > 1  # runs, which have networks of the same names
        for path in paths:
            with np.load(path) as arrays:
                of_run = f", {path.parent.parent.name}" * several
                self.graphs[path.parent.name + of_run] = self.read(dict(arrays))

    def numbers(self, kind, names):
        known = self.vocabulary[kind]
        return np.array([known.setdefault(name, len(known) + 1) for name in names.tolist()])

    def read(self, z):
        layouts, kernels = self.numbers("layouts", z["layouts"]), self.numbers("kernels", z["kernels"])
        hot, width, nodes = z["node_config_feat"], len(layouts), len(z["node_feat"])
        config = np.zeros((len(hot), nodes, 3), np.int64)
        for column, (first, names) in enumerate(((0, layouts), (width, layouts), (2 * width, kernels))):
            part = hot[..., first : first + len(names)]
            config[:, z["node_config_ids"], column] = np.where(part.any(-1), names[part.argmax(-1)], 0)
        features = np.log1p(np.abs(z["node_feat"])).astype(np.float32)
        ops = self.numbers("opcodes", z["opcodes"])[z["node_opcode"]]
        arrays = features, ops, z["edge_index"].T, config, np.log(z["config_runtime"]).astype(np.float32)
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]


class Ranker(nn.Module):
    """Scores of the assignments of one graph: (c, n, 3) numbers of layouts read and written, and of kernels."""

    def __init__(self, vocabulary, features):
        super().__init__()
        layouts, kernels, ops = (len(vocabulary[name]) + 1 for name in ("layouts", "kernels", "opcodes"))
        self.read, self.written = nn.Embedding(layouts, 16), nn.Embedding(layouts, 16)
        self.kernel, self.op = nn.Embedding(kernels, 16), nn.Embedding(ops, 16)
        self.first = nn.Linear(features + 64, WIDTH)
        self.messages = nn.ModuleList(nn.Linear(2 * WIDTH + 1, WIDTH) for _ in range(2 * LAYERS))
        self.updates = nn.ModuleList(nn.Sequential(nn.Linear(3 * WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, features, ops, edges, config):
        reader, producer = edges
        moved = (config[:, reader, 0] != config[:, producer, 1]).float().unsqueeze(-1)  # a reorder is between them
        fixed = torch.cat([features, self.op(ops)], 1).expand(len(config), -1, -1)
        chosen = self.read(config[..., 0]), self.written(config[..., 1]), self.kernel(config[..., 2])
        h = torch.relu(self.first(torch.cat([fixed, *chosen], -1)))
        for k, update in enumerate(self.updates):
            sums = []
            for message, to, of in (
                (self.messages[2 * k], reader, producer),
                (self.messages[2 * k + 1], producer, reader),
            ):
                told = torch.relu(message(torch.cat([h[:, to], h[:, of], moved], -1)))
                sums.append(torch.zeros_like(h).index_add(1, to, told))
            h = h + update(torch.cat([h, *sums], -1))
        return torch.logsumexp(self.last(h).squeeze(-1), 1)  # the logarithm of a sum over the nodes


def trained(graphs, vocabulary, seconds):
    """A ranker after so many seconds of pairs of the assignments of each graph."""
    torch.manual_seed(0)
    model = Ranker(vocabulary, graphs[0][0].shape[1])
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * max(0.05, left / seconds)
        for features, ops, edges, config, runtime in graphs:
            some = torch.randperm(len(runtime))[:32]
            scores, truth = model(features, ops, edges, config[some]), runtime[some]
            longer = truth[:, None] - truth[None, :]
            loss = (nn.functional.softplus(-8 * (scores[:, None] - scores[None, :])) * longer.clamp(min=0)).sum()
            optimizer.zero_grad()
            (loss / longer.clamp(min=0).sum()).backward()
            optimizer.step()
    return model.eval()


def judged(scores, runtime):
    """(Kendall's tau, regret of the first, of the best of the first five)."""
    a, b = (np.sign(x[:, None] - x[None, :]) for x in (scores, runtime))
    order, seconds = np.argsort(scores), np.exp(runtime - runtime.min())
    return (a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()), seconds[order[0]] - 1, seconds[order[:5]].min() - 1


def main(folder, seconds):
    torch.set_num_threads(1)
    every = Graphs(folder)
    families = sorted({family(name) for name in every.graphs})
    parts = [families[k::PARTS] for k in range(min(PARTS, len(families)))]
    random, means = np.random.default_rng(0), []
    print(f"{'held out':<18}{'tau':>6}{'top 1':>9}{'top 5':>9}   random:{'top 1':>8}{'top 5':>9}")
    for held in parts:
        model = trained([g for name, g in every.graphs.items() if family(name) not in held], every.vocabulary, seconds)
        for name in (name for name in every.graphs if family(name) in held):
            *given, runtime = every.graphs[name]
            with torch.no_grad():
                found = judged(model(*given).numpy(), runtime.numpy())
            blind = np.mean([judged(random.permutation(len(runtime)), runtime.numpy()) for _ in range(200)], 0)
            means.append([*found, *blind])
            print(row(name, means[-1]))
    print(row("mean", np.mean(means, 0)))


def row(name, found):
    tau, one, five, _, blind_one, blind_five = found
    return f"{name:<18}{tau:>6.2f}{one:>9.1%}{five:>9.1%}{blind_one:>18.1%}{blind_five:>9.1%}"


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "bench" / "results" / "lab-data"
    main(given, float(sys.argv[2]) if len(sys.argv) > 2 else 20.0)
