"""The rates of a machine, from which costs are computed."""
