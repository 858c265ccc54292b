"""Bricks shared by the kernels."""
