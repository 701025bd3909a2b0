"""Lies here so that every test, wherever below, can import the helpers beside it."""

import importlib.util
import os

# Several workers share the cores, and small tensors gain nothing from threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["pytester"]

if importlib.util.find_spec("hypothesis"):  # not in the small environments with older versions of pytest
    from hypothesis import settings

    # Of the property tests: ``pytest --hypothesis-profile=nightly`` looks longer.
    settings.register_profile("default", max_examples=40)
    settings.register_profile("nightly", max_examples=1000)
    settings.load_profile("default")
