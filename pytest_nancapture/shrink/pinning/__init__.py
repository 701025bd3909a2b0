"""From a bundle to a fixture: its name, its place, the proof that it is red, and its promotion once it is fixed."""
