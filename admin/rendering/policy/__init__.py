"""What a month will have cost at its end. Pure."""
