"""Wrappers on instances: a module's hook or a strategy's method gets one around it, and loses it again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Around = Callable[..., Any]
"""Called with the wrapped function and then its arguments."""


class Wraps:
    """Wrappers that are in place, so that all can be taken off.

    Lightning looks hooks up on the instance, so a wrapper there runs after every callback's hook. Plain functions are
    used: a deep copy of the module, such as weight averaging makes, carries them along unbound.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, around: Around) -> None:
        """Wrap ``owner.name``: calls to it become ``around(original, *args, **kwargs)``."""
        original = getattr(owner, name)
        had = vars(owner).get(name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        vars(owner)[name] = wrapper

        def undo() -> None:
            if vars(owner).get(name) is wrapper:
                if had is None:
                    del vars(owner)[name]
                else:
                    vars(owner)[name] = had

        self._undo.append(undo)

    def take_off(self) -> None:
        """Remove all, last one first; one that somebody has wrapped again stays, and does nothing but pass on."""
        while self._undo:
            self._undo.pop()()
