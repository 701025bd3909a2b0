"""A logger for steps that are run again: it takes everything and keeps nothing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any


class Nothing:
    """Whatever is done with it gives it again, as in ``experiment.config["lr"].update(...)``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None: ...


def silent_logger(package: str, folder: str) -> Any:
    """The logger, of the Lightning that `package` names.

    Args:
        folder: for what user code writes where the logger says.
    """

    class Silent(importlib.import_module(f"{package}.loggers.logger").DummyLogger):  # type: ignore[misc]
        experiment = Nothing()
        save_dir = log_dir = root_dir = folder

    return Silent()
