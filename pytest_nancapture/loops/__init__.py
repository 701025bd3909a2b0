"""One folder for each training loop: how its step is watched, run again in place, and played from a bundle."""
