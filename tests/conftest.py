"""Lies here so that every test, wherever below, can import the helpers beside it."""

import os

# Several workers share the cores, and small tensors gain nothing from threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["pytester"]
