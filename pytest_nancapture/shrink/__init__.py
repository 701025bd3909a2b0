"""From a captured bundle to a fixture: prove that it is red, put it in its place."""
