"""What a bundle holds of the datamodule that the module's code may read: how to build it, and its small attributes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pytest_nancapture.bundle import numerics, rng
from pytest_nancapture.bundle.manifest import BuiltRecord, MissingRecord, StateRecord
from pytest_nancapture.bundle.tensors.kinds import bare
from pytest_nancapture.bundle.tensors.names import buffers, parameters, submodules
from pytest_nancapture.bundle.values.decode import Decoder
from pytest_nancapture.bundle.values.encode import Encoder
from pytest_nancapture.bundle.values.references import LiveResolver
from pytest_nancapture.capture.recipe import Arguments, Recipe, recipe_of
from pytest_nancapture.errors import UnwritableValueError
from pytest_nancapture.step.data import make_data
from pytest_nancapture.step.run import Run
from pytest_nancapture.step.state.compare import Comparison, Difference
from pytest_nancapture.step.state.objects import is_small

log = logging.getLogger("pytest_nancapture")

_PREFIX = "datamodule/"
_MOST = 20_000
"""Values, and kilobytes, that one attribute or argument may hold to be written."""
_LARGE = "it holds a data set, or more than a bundle keeps of a datamodule"


def data_recipe(run: Run, arguments: Arguments) -> Recipe:
    """How the datamodule is built, without arguments that are data."""
    kept = {name: value for name, value in arguments.values.items() if is_small(value, _MOST, run.packages)}
    return recipe_of(
        run.data,
        None,
        dataclasses.replace(arguments, values=kept),
        prefix=f"{_PREFIX}argument/",
        fits=lambda value: is_small(value, _MOST, run.packages),
    )


def record_of(run: Run, arguments: Arguments) -> tuple[BuiltRecord, dict[str, Tensor]]:
    """The datamodule's record and the tensors that its values are made of; it has to be at the instant."""
    recipe = data_recipe(run, arguments)
    record = BuiltRecord(
        target=recipe.target.target,
        file=recipe.target.file,
        arguments={**recipe.arguments, **recipe.optional},
        unwritten=tuple(recipe.problems),
        instantiator=recipe.instantiator,
    )
    with rng.preserved(), numerics.preserved():
        record, built = _built(record, recipe)
    ignored = {"trainer"}
    differences = Comparison(run.data, built, ignored, run.packages).of_objects()
    encoder = Encoder(prefix=f"{_PREFIX}attribute/", device=run.device)
    own = {id(part) for _, part in (*submodules(run.module), *parameters(run.module), *buffers(run.module))}
    state: list[StateRecord] = []
    missing: dict[str, str] = {}
    for name, places in _by_attribute(differences).items():
        value = vars(run.data).get(name)
        try:
            if id(value) in own:
                missing[name] = "it is a part of the module"
            elif not is_small(value, _MOST, run.packages):
                missing[name] = _LARGE
            else:
                state += [_state(encoder, place) for place in places]
        except UnwritableValueError as error:
            missing[name] = error.problem
        except Exception as error:  # of a class of the user's
            missing[name] = f"looking at it raised {type(error).__name__}: {error}"
    missing |= dict.fromkeys(vars(built).keys() - vars(run.data).keys() - ignored, "gone in the run's datamodule")
    return (
        dataclasses.replace(
            record,
            state=tuple(each for each in state if each.path[0][1] not in missing),
            missing=tuple(MissingRecord(where=name, why=why) for name, why in sorted(missing.items())),
        ),
        {**recipe.tensors, **encoder.tensors},
    )


def _built(record: BuiltRecord, recipe: Recipe) -> tuple[BuiltRecord, Any]:
    """What a replay will build, before it has any state; empty where the constructor does not work."""
    tensors = {name: bare(tensor).cpu().clone() for name, tensor in recipe.tensors.items()}
    decoder = Decoder(tensors, LiveResolver())
    try:
        return record, make_data(record, decoder, lambda *_: None)
    except Exception as error:  # of the user's constructor
        log.debug("nancapture: no datamodule can be built to compare with", exc_info=True)
        why = f"its constructor raised {type(error).__name__}: {error}"
        record = dataclasses.replace(record, arguments={}, instantiator=None, unwritten=(why,))
        return record, make_data(record, decoder, lambda *_: None)


def _by_attribute(differences: list[Difference]) -> Mapping[str, list[Difference]]:
    grouped: dict[str, list[Difference]] = {}
    for difference in differences:
        grouped.setdefault(difference.way[0].name, []).append(difference)
    return grouped


def _state(encoder: Encoder, difference: Difference) -> StateRecord:
    where = str(difference.way[0].name)
    path = tuple([step.kind, encoder.encode(step.name, where)] for step in difference.way)
    return StateRecord(module="", path=path, value=encoder.encode(difference.value, where))
