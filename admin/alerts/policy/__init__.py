"""When a threshold is reached and when a message is tried again. Pure."""
