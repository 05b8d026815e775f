"""From a network of floats to one of integers: ranges measured on samples, a rewriting, a report."""
