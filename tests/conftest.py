"""Lies here so that every test, wherever below, can import the helpers beside it."""

pytest_plugins = ["pytester"]
