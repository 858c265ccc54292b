"""Spec to artifact: compile without a GPU, keep in a store, load without the compiler."""
