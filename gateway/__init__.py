"""The tenants' side of Polyhost: the path of a request and nothing else."""
