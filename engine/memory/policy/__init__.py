"""What a cached block is worth. Pure."""
