"""Trace a replay's operations, find the one that is to blame, explain it."""
