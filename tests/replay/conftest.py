"""The bundles of `captured.py`, captured once a session."""

from captured import accumulated, mended, net, seen

__all__ = ["accumulated", "mended", "net", "seen"]
