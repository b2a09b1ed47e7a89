"""Bytes under names that the product chooses: the seam `ObjectStore`, and a folder behind it. A
leaf of the standard library alone, for engine, gateway and admin alike."""

__all__ = ["folder_store", "object_store", "whole_files"]
