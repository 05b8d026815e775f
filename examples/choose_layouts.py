"""Compare fixed layouts, the planner's choice, and two rules of our own for a network.

compile takes layouts={node: layout} and planner=function. All plans use the same table of predicted
times, so their costs can be compared. Then the plans run in turns, so that other work of the machine
disturbs all of them alike.
"""

import time

import numpy as np

import blockconv as bc

WIDTHS = (16, 32, 64, 128)


def network() -> bc.Network:
    """3x3 and 1x1 convolutions, wider and smaller at every step."""
    rng = np.random.default_rng(0)
    b = bc.NetworkBuilder("pyramid")
    x, ic = b.input("image", (1, 3, 56, 56)), 3
    for oc in WIDTHS:
        wide, narrow = rng.standard_normal((oc, ic, 3, 3)) / (3 * ic), rng.standard_normal((oc, oc, 1, 1)) / oc
        x = b.conv2d(x, wide.astype(np.float32), stride=2, padding=1, activation="relu", name=f"conv{oc}_3x3")
        x, ic = b.conv2d(x, narrow.astype(np.float32), activation="relu", name=f"conv{oc}_1x1"), oc
    b.output(x)
    return b.build()


def by_width(problem: bc.LayoutProblem) -> dict[str, str]:
    """A planner: blocks of 16 for wide convolutions, channels last for narrow ones."""
    net = problem.network
    return {node.name: "NCHW16" if net.problem(node).oc >= 64 else "NHWC" for node in net.nodes}


def medians(plans: dict[str, bc.Plan], image: np.ndarray, rounds: int = 30) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(rounds):
        for name, plan in plans.items():
            start = time.perf_counter()
            plan(image)
            times[name].append(time.perf_counter() - start)
    return {name: sorted(taken)[rounds // 2] for name, taken in times.items()}


if __name__ == "__main__":
    net = network()
    # Another layout after every op costs little: kernels change the layout as they store.
    alternating = {node.name: ("NHWC", "NCHW")[k % 2] for k, node in enumerate(net.nodes)}
    plans = {
        "optimal": bc.compile(net, threads=1),
        "greedy": bc.compile(net, planner="greedy", threads=1),
        "all NCHW": bc.compile(net, layouts="NCHW", threads=1),
        "all NHWC": bc.compile(net, layouts="NHWC", threads=1),
        "all NCHW16": bc.compile(net, layouts="NCHW16", threads=1),
        "by width": bc.compile(net, planner=by_width, threads=1),
        "alternating": bc.compile(net, layouts=alternating, threads=1),
    }

    image = np.random.default_rng(1).standard_normal((1, 3, 56, 56)).astype(np.float32)
    results = {name: plan(image) for name, plan in plans.items()}
    measured = medians(plans, image)
    print(f"{'plan':<12} {'predicted, µs':>13} {'measured, µs':>13} {'reorders':>9}   layouts written")
    for name, plan in plans.items():
        written = [str(action.writes[1]) for action in plan.actions if action.node is not None]
        changes = [layout for k, layout in enumerate(written) if not k or layout != written[k - 1]]
        numbers = f"{plan.cost * 1e6:>13.0f} {measured[name] * 1e6:>13.0f} {len(plan.reorders):>9}"
        print(f"{name:<12} {numbers}   {' '.join(changes)}")
    print("all on one thread; layouts in order, repetitions left out")

    for name, result in results.items():
        assert np.abs(result - results["optimal"]).max() <= 1e-4 * np.abs(result).max(), name
