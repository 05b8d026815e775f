"""Networks: the graph, its fusion, and the plan of layouts that runs it."""
