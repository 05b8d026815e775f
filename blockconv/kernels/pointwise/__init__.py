"""Element-wise ops whose operands have types of their own."""
