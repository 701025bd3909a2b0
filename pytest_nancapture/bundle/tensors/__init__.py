"""Tensors on disk: one file of them, those that a few numbers make, and a module's under their names."""
