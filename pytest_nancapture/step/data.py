"""What gave the training its batches, built again so that the module's code can read it: a datamodule.

It gives no data here. What a bundle lacks of it raises where it is read, and only there: most modules read nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_nancapture.bundle.manifest import BuiltRecord
from pytest_nancapture.bundle.values.decode import Decoder
from pytest_nancapture.errors import RebuildError
from pytest_nancapture.step.configuration import instantiate
from pytest_nancapture.step.rebuild import way_of
from pytest_nancapture.step.state.places import put

_HELP = (
    "build it in a conftest.py: the hook pytest_nancapture_trainer_kwargs(bundle) may return {'datamodule': ...}, "
    "set up as the step needs it"
)


class NotBuilt:
    """Stands where there was one that cannot be built: whatever is read of it raises."""

    allow_zero_length_dataloader_with_multiple_devices = False

    def __init__(self, why: str, lacked: list[str]) -> None:
        self._why = why
        self._lacked = lacked

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_why", "_lacked"):
            raise AttributeError(name)
        raise _error(f"the code reads {name} of the datamodule, which cannot be built: {self._why}", self._lacked)

    def teardown(self, stage: str) -> None: ...

    def on_exception(self, exception: BaseException) -> None: ...


class _LeftOut:
    """An attribute that the bundle does not hold: to read it raises, unless the code has set it."""

    def __init__(self, name: str, why: str, lacked: list[str]) -> None:
        self._name = name
        self._why = why
        self._lacked = lacked

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is not None and self._name in vars(owner):
            return vars(owner)[self._name]
        what = f"the code reads {self._name} of the datamodule, which the bundle does not hold: {self._why}"
        raise _error(what, self._lacked)

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)[self._name] = value

    def __delete__(self, owner: Any) -> None:
        vars(owner).pop(self._name, None)


def _error(what: str, lacked: list[str]) -> RebuildError:
    lacked.append(f"{what}; {_HELP}")
    return RebuildError(lacked[-1])


def build_data(
    record: BuiltRecord, decoder: Decoder, check_class: Callable[[type, str], None], lacked: list[str]
) -> Any:
    """The datamodule as it was at the instant, or a :class:`NotBuilt`.

    Args:
        check_class: raises for a class that the loop has no datamodules of; its second argument says what named it.
        lacked: gets a sentence for each read of what is not there, since the code may catch what is raised then.
    """
    try:
        data = make_data(record, decoder, check_class)
        names = {missing.where: missing.why for missing in record.missing if not missing.where.startswith("__")}
        if names:
            kind = type(data)
            left_out = {name: _LeftOut(name, why, lacked) for name, why in names.items()}
            same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
            data.__class__ = type(kind.__name__, (kind,), {**same, **left_out})
        put_data(data, record, decoder)
    except Exception as error:  # of the user's constructor; whoever reads the datamodule is told
        what = str(error) if isinstance(error, RebuildError) else f"{type(error).__name__}: {error}"
        return NotBuilt(f"{record.target}: {what}", lacked)
    return data


def make_data(record: BuiltRecord, decoder: Decoder, check_class: Callable[[type, str], None]) -> Any:
    """As its constructor makes it; empty where its arguments are not known.

    Raises:
        RebuildError: its class cannot be found, or is of another kind.
        Exception: whatever the constructor raises.
    """
    kind = decoder.resolver.resolve(record.target, record.file)
    if not isinstance(kind, type):
        raise RebuildError(f"datamodule {record.target}: expected a class, came {kind!r:.80}")
    check_class(kind, f"datamodule {record.target}")
    if record.unwritten:
        return object.__new__(kind)
    arguments = {name: decoder.decode(value) for name, value in record.arguments.items()}
    if record.instantiator is None:
        return kind(**arguments)
    return instantiate(kind, arguments, record.instantiator, decoder.resolver)


def put_data(data: Any, record: BuiltRecord, decoder: Decoder) -> None:
    """Its attributes as they were at the instant.

    Raises:
        RebuildError: a value cannot be made, or would take the place of code.
    """
    if isinstance(data, NotBuilt):
        return
    for missing in record.missing:
        vars(data).pop(missing.where, None)
    for state in record.state:
        put(data, way_of(state, decoder), decoder.decode(state.value))
