"""Does a fault come back from its bundle: replays of it, in fresh processes or in the run's own."""
