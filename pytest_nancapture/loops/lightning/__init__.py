"""Lightning, as ``lightning.pytorch`` or ``pytorch_lightning``."""
