"""The operators' side of Polyhost: operations, the command line and the pages."""
