"""Tensors on disk: which kinds, how they are laid out, one file of them, and a module's under their names."""
