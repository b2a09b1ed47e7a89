"""Which copies the host tier keeps. Pure."""
