"""What models are in demand, and which one is evicted. Pure."""
