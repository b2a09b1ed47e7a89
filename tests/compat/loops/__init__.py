"""Loops of other people's clients. Run in an environment of their own by test_loops.py."""
