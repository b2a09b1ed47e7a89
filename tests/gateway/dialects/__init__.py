"""Other APIs over the same core."""
