"""Constructor arguments as Lightning keeps them: in ``hparams``."""

from __future__ import annotations

import inspect
from typing import Any

from pytest_nancapture.capture.recipe import Arguments, constructor_parameters

_FACTORY = "give NaNCapture(factory='package.module:function') a function that builds the module"


def saved_arguments(module: Any) -> Arguments:
    """Those that ``self.save_hyperparameters()`` saved."""
    return Arguments(
        values=_hyperparameters(module),
        door="NaNCapture",
        if_unwritable=(
            f"{_FACTORY}, or leave it out with self.save_hyperparameters(ignore=[...]) if the constructor has a default"
        ),
        if_missing=f"not among its hparams; call self.save_hyperparameters() in __init__, or {_FACTORY}",
    )


def _hyperparameters(module: Any) -> dict[str, Any]:
    """The saved arguments that the constructor takes, or the one argument that held them all."""
    accepted = constructor_parameters(type(module))
    saved = dict(getattr(module, "hparams_initial", {}))
    whole = getattr(module, "_hparams_name", None)
    if saved and whole in accepted:
        return {str(whole): module.hparams_initial}
    kinds = {p.kind for p in inspect.signature(type(module).__init__).parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    return {name: value for name, value in saved.items() if name in accepted or takes_any}
