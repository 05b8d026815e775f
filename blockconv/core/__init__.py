"""The base of everything else: layouts, problems, errors, the machine that code is compiled for."""
