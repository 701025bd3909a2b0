"""From a captured bundle to a small one with the same fault, and from there to a fixture."""
