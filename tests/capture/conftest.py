"""Profiles of the property tests: ``pytest --hypothesis-profile=nightly`` looks longer."""

from hypothesis import settings

settings.register_profile("default", max_examples=40)
settings.register_profile("nightly", max_examples=600)
settings.load_profile("default")
