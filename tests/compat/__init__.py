"""Other people's clients against a real server: their SDKs' own suites, and loops of tools."""
