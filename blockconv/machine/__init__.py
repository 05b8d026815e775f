"""What costs are made of: rates of the machine that they were fitted to."""
