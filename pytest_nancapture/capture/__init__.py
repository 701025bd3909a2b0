"""The training side: the callback, the finite check, the window, the rerun in place."""
