"""What one training step is, whatever runs it: its state, the look at it, what was found."""
