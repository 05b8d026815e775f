"""The lab's data set: networks with every candidate, every reorder, exact optima and measured assignments of layouts.

`schema` has the fields, `probe` what is measured in workers, `collect` the measuring of a network, `store` the folder,
`planners` the ways to choose, and `judge` what a set says about planners and cost models.
"""
