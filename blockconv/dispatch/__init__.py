"""One op on users' arrays: which kernel, its packed weights, the arrays in and out, and what was measured."""
