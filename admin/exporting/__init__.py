"""The process that makes exports in the background."""
