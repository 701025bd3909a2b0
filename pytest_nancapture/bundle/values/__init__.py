"""Values as JSON: batch trees, constructor arguments, classes by name; and back, without running a bundle's code."""
