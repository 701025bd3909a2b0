"""One candidate of a shrink: planned as plain values, made in memory, replayed in a process of its own."""
