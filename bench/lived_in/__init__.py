"""A data folder that looks lived in: 45 days of an installation's history, made in minutes."""
