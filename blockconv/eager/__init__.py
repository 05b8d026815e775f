"""A place that pickles from before 0.2.0 name."""
