"""Lies here so that every test, wherever below, can import the helpers beside it."""

import os

from hypothesis import settings

# Several workers share the cores, and small tensors gain nothing from threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["pytester"]

# Of the property tests: ``pytest --hypothesis-profile=nightly`` looks longer.
settings.register_profile("default", max_examples=40)
settings.register_profile("nightly", max_examples=1000)
settings.load_profile("default")
