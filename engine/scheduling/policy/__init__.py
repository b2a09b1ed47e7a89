"""Which requests a step takes, and how much memory each tenant may hold. Pure."""
