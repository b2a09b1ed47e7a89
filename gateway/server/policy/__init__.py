"""How much memory a worker gets. Pure."""
