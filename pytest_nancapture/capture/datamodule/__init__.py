"""The datamodule that a run had: what a bundle holds of it."""
