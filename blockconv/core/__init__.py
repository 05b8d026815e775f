"""What everything else stands on: layouts, problems, errors, the machine that code is compiled for."""
