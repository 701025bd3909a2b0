"""The module, built again from what a bundle says; and whatever a bundle must not get built or called."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import models
import pytest
import torch
from fake_bundles import write_bundle
from torch import nn

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import ModuleRecord, StateRecord
from pytest_nancapture.bundle.values.decode import Decoder
from pytest_nancapture.bundle.values.references import Resolver
from pytest_nancapture.errors import MismatchError, RebuildError
from pytest_nancapture.loops.loop import loop_named
from pytest_nancapture.replay.resolve import resolver_for
from pytest_nancapture.step.rebuild import build_module, load_tensors, set_state

if TYPE_CHECKING:
    from pathlib import Path

FACTORY_HELP = (
    "; build it in the hook pytest_nancapture_module(bundle) of a conftest.py, or capture with NaNCapture(factory=...)"
)
CALLED: list[str] = []


LOOP = loop_named("lightning.pytorch")


def build(target: str = "models:Net", **fields: Any) -> Any:
    resolver = Resolver()
    return build_module(ModuleRecord(target=target, **fields), Decoder({}, resolver), resolver, LOOP.check_class)


def not_a_module() -> Any:
    return nn.Linear(1, 1)


def failing() -> Any:
    raise ValueError("no data")


class Greedy:
    """Not a module, and it must not even be made."""

    def __init__(self) -> None:
        CALLED.append("Greedy")


class Plain(nn.Module):
    """A module that no Trainer can run, and that must not be made to find that out."""

    def __init__(self) -> None:
        CALLED.append("Plain")


def test_a_class_with_its_arguments() -> None:
    """As training made it."""
    module = build(arguments={"width": 5})
    assert (models.Net, (5, 3)) == (type(module), tuple(module.linear.weight.shape))


def test_a_class_without_arguments() -> None:
    """Defaults are code, and so they are today's."""
    assert tuple(build().linear.weight.shape) == (2, 3)


def test_a_factory() -> None:
    """It is called without arguments, instead of the class."""
    module = build("models:Required", factory="models:make_required", arguments={"width": 9})
    assert (models.Required, (4, 3)) == (type(module), tuple(module.linear.weight.shape))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("os:system", "target os:system: expected a subclass of torch.nn.Module, came <built-in function system>"),
        (
            "subprocess:Popen",
            "target subprocess:Popen: expected a subclass of torch.nn.Module, came <class 'subprocess.Popen'>",
        ),
        (
            "builtins:eval",
            "target builtins:eval: expected a subclass of torch.nn.Module, came <built-in function eval>",
        ),
        ("models:at_least_one", "target models:at_least_one: expected a subclass of torch.nn.Module, came <function"),
        (f"{__name__}:Greedy", f"target {__name__}:Greedy: expected a subclass of torch.nn.Module, came <class"),
        (f"{__name__}:Plain", f"target {__name__}:Plain: expected a LightningModule, came Plain"),
        ("torch.fx:GraphModule", "target torch.fx:GraphModule: expected a LightningModule, came GraphModule"),
        ("models:Gone", "models:Gone: models has no 'Gone'; if it was renamed, say so in bundle.json"),
        ("no_such_module:Net", "cannot import no_such_module: No module named 'no_such_module'"),
        ("models", "expected a target like 'package.module:Class', came 'models'"),
    ],
)
def test_a_target_that_is_no_module(target: str, message: str) -> None:
    """Only the class of a LightningModule may be called, and nothing else is."""
    CALLED.clear()
    with pytest.raises(RebuildError) as caught:
        build(target)
    assert message in str(caught.value)
    assert CALLED == []


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            "os:getcwd",
            "factory os:getcwd: expected a function that builds a LightningModule, came <built-in function getcwd>",
        ),
        (
            "os:abort",
            "factory os:abort: expected a function that builds a LightningModule, came <built-in function abort>",
        ),
        (
            "platform:platform",
            "factory platform:platform: expected a function that builds a LightningModule, came <function",
        ),
        ("code:interact", "factory code:interact: expected a function that builds a LightningModule, came <function"),
        (
            f"{__name__}:Greedy",
            f"factory {__name__}:Greedy: expected a function that builds a LightningModule, came <class",
        ),
        (
            f"{__name__}:CALLED",
            f"factory {__name__}:CALLED: expected a function that builds a LightningModule, came []",
        ),
        (f"{__name__}:not_a_module", f"{__name__}:not_a_module: expected a LightningModule, came Linear"),
        (f"{__name__}:failing", f"{__name__}:failing() failed with ValueError: no data{FACTORY_HELP}"),
    ],
)
def test_a_factory_that_is_none(factory: str, message: str) -> None:
    """A factory is a function of somebody's own, and makes a LightningModule."""
    CALLED.clear()
    with pytest.raises(RebuildError) as caught:
        build(factory=factory)
    assert message in str(caught.value)
    assert CALLED == []


def test_a_constructor_that_fails() -> None:
    """The error names the call, and what rescues this bundle: a hook that is there to be pasted."""
    with pytest.raises(RebuildError) as caught:
        build("models:Required")
    assert str(caught.value).startswith("models:Required() failed with TypeError: ")
    assert str(caught.value).endswith(
        "; the hook pytest_nancapture_module in a conftest.py rescues this bundle: its test prints one"
    )
    hook: dict[str, Any] = {}
    code = caught.value.detail.replace("width=...,  # as the run had it", "width=4,")
    exec(code, hook)
    made = hook["pytest_nancapture_module"](
        SimpleNamespace(manifest=SimpleNamespace(module=SimpleNamespace(target="models:Required")))
    )
    assert type(made) is models.Required


def test_a_constructor_that_lacks_what_could_not_be_written() -> None:
    """What was said at capture helps the next run."""
    problem = "argument width of Required: a lock cannot be written; give a factory"
    with pytest.raises(RebuildError) as caught:
        build("models:Required", unwritten=(problem,))
    assert caught.value.detail.splitlines()[-1] == f"for the next run: {problem}"


def test_an_argument_that_a_constructor_does_not_take_any_more() -> None:
    """The error names the arguments that were tried."""
    with pytest.raises(RebuildError, match=r"models:Net\(width, depth\) failed with TypeError: .*'depth'"):
        build(arguments={"width": 2, "depth": 3})


def test_an_argument_that_names_what_it_may_not() -> None:
    """Before the constructor is called."""
    with pytest.raises(RebuildError, match="'os:system': a bundle may not name <built-in function system>"):
        build(arguments={"width": {"reference": "os:system"}})


@pytest.mark.parametrize("file", ["/etc/evil.py", "../evil.py", "a/../../evil.py", "c:\\evil.py"])
@pytest.mark.parametrize("field", ["file", "factory_file"])
def test_files_outside_of_the_repository(field: str, file: str) -> None:
    """Are refused, even where the module could be imported without."""
    factory = "models:make_required" if field == "factory_file" else None
    with pytest.raises(RebuildError) as caught:
        build(factory=factory, **{field: file})
    assert f"expected a source file relative to the repository, came {file!r}" == str(caught.value)


def test_check_class() -> None:
    """What a user's hook builds is looked at as well."""
    LOOP.check_class(models.Net, "the module given")
    with pytest.raises(RebuildError) as caught:
        LOOP.check_class(nn.Linear, "the module given")
    assert str(caught.value) == "the module given: expected a LightningModule, came Linear"


def test_where_source_files_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here and from above the bundle upward, each to the top of its repository; then where Python imports from."""
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setattr(sys, "path", [*(path for path in sys.path if "site-packages" in path), str(own)])
    bundle = Bundle.open(write_bundle(tmp_path / "fixed" / "fixtures" / "nan" / "step"))
    (tmp_path / "fixed" / ".git").mkdir()
    here = tmp_path / "work" / "deep"
    here.mkdir(parents=True)
    (tmp_path / "work" / ".git").mkdir()
    monkeypatch.chdir(here)
    fixed = tmp_path / "fixed"
    expected = (here, here.parent, fixed / "fixtures" / "nan", fixed / "fixtures", fixed, own)
    assert expected == resolver_for(bundle).places


def test_a_bundle_in_ones_own_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder is looked at once, and the bundle's own never."""
    bundle = Bundle.open(write_bundle(tmp_path / "fixtures" / "step"))
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(bundle.path), ""])
    assert (tmp_path, tmp_path / "fixtures") == resolver_for(bundle).places


def test_code_that_comes_with_a_bundle_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own folder is none of the places, so that a module or a script beside bundle.json is never found."""
    path = write_bundle(tmp_path / "bundles" / "step", module={"target": "evil:Net", "file": "evil.py"})
    for name in ("evil.py", "train.py"):
        (path / name).write_text("import builtins\nbuiltins.evil = True\n")
    monkeypatch.chdir(tmp_path)
    resolver = resolver_for(Bundle.open(path))
    for target, file in (("evil:Net", "evil.py"), ("__main__:Net", "train.py")):
        with pytest.raises(RebuildError):
            resolver.resolve(target, file)
    assert not hasattr(__import__("builtins"), "evil")
    assert "evil" not in sys.modules


def captured(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def test_loading() -> None:
    """Parameters and buffers get the captured values, in place: optimizers and ties keep hold of them."""
    expected, module = captured(models.Dropping()), models.Dropping()
    weight = module.linear.weight
    load_tensors(module, expected)
    assert weight is module.linear.weight
    assert all(torch.equal(expected[name], tensor) for name, tensor in captured(module).items())


def test_loading_ties() -> None:
    """What was tied stays tied."""
    module = models.Tied()
    load_tensors(module, captured(models.Tied()))
    assert module.first.weight is module.second.weight


def test_loading_what_code_makes() -> None:
    """A non-persistent buffer that no step had changed is not in a bundle, and stays as today's code makes it."""
    expected, module = captured(models.Tied()), models.Tied()
    del expected["cache"]
    load_tensors(module, expected)
    assert torch.equal(torch.arange(4.0), module.cache)


def test_loading_a_cache_that_has_grown() -> None:
    """A non-persistent buffer of another size takes the captured one's place: code would have made it grow."""
    module = models.Tied()
    load_tensors(module, {**captured(models.Tied()), "cache": torch.arange(9.0)})
    assert torch.equal(torch.arange(9.0), module.cache)
    assert "cache" in module._non_persistent_buffers_set


def test_loading_does_not_go_through_autograd() -> None:
    """Versions and gradients are no business of a replay's."""
    module = models.Net()
    load_tensors(module, captured(models.Net()))
    assert (module.linear.weight.grad_fn, module.linear.weight.requires_grad) == (None, True)


def test_what_no_longer_fits() -> None:
    """Every name is told, with how it differs, and nothing is copied."""
    module = models.Net()
    before = captured(module)
    tensors = {"linear.weight": torch.ones(4, 3), "head.weight": torch.ones(2), "scale": torch.ones(())}
    with pytest.raises(MismatchError) as caught:
        load_tensors(module, tensors)
    expected = ("head.weight is gone", "scale is gone", "linear.bias is new", "linear.weight was 4x3, is 2x3")
    assert expected == caught.value.names
    assert "the captured tensors no longer fit the code: " + "; ".join(expected) == str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in captured(module).items())


def test_a_scalar_that_no_longer_fits() -> None:
    """Has no shape to show."""
    module = nn.BatchNorm1d(3)
    with pytest.raises(MismatchError, match="num_batches_tracked was 1, is a scalar"):
        load_tensors(module, {**captured(module), "num_batches_tracked": torch.ones(1)})


def test_many_that_no_longer_fit() -> None:
    """The first few are named, the others counted."""
    with pytest.raises(
        MismatchError, match=r"^the captured .*: a is gone; b is gone; c is gone; d is gone; e is gone; and 2"
    ):
        load_tensors(nn.Identity(), {name: torch.ones(1) for name in "abcdefg"})


def test_modes_and_frozen_parameters() -> None:
    """As they were at the instant, whatever today's constructor does."""
    module = models.Dropping()
    set_state(
        module, ModuleRecord(target="", eval_mode=("", "norm"), frozen=("linear.weight",)), Decoder({}, Resolver())
    )
    assert [m.training for m in (module, module.norm, module.drop, module.calm)] == [False, False, True, True]
    assert [p.requires_grad for p in (module.linear.weight, module.linear.bias, module.frozen.weight)] == [
        False,
        True,
        True,
    ]


def test_attributes() -> None:
    """Those that had changed since fit began, NaN among them; of a submodule that is gone none."""
    module = models.Dropping()
    values = {"": ("temperature", 0.25), "drop": ("p", {"float": "nan"}), "gone": ("p", 1)}
    state = tuple(StateRecord(module=path, path=(["attribute", name],), value=v) for path, (name, v) in values.items())
    set_state(module, ModuleRecord(target="", state=state), Decoder({}, Resolver()))
    assert (module.temperature, module.drop.p != module.drop.p) == (0.25, True)


@pytest.mark.parametrize("name", ["training_step", "device", "__class__", "forward", "divisor"])
@pytest.mark.parametrize("value", [1.0, {"list": [1]}, {"reference": "models:at_least_one"}, {"dict": []}])
def test_state_in_the_place_of_code(name: str, value: Any) -> None:
    """A function, or anything else, in a method's or a property's place would be code."""
    record = ModuleRecord(target="", state=(StateRecord(module="", path=(["attribute", name],), value=value),))
    with pytest.raises(RebuildError, match=f"state at '{name}': expected a place for values, came one for code"):
        set_state(models.Net(), record, Decoder({}, Resolver()))


def test_an_attribute_that_asks_for_the_system() -> None:
    """Is refused by the decoder."""
    asking = StateRecord(module="", path=(["attribute", "x"],), value={"reference": "os:system"})
    record = ModuleRecord(target="", state=(asking,))
    with pytest.raises(RebuildError, match="'os:system': a bundle may not name"):
        set_state(models.Net(), record, Decoder({}, Resolver()))


def test_a_buffer_that_was_registered_later_gets_a_place():
    """By a script, or by the step: what is built has none, but what is gone from the code is gone."""
    captured_state = {**captured(models.Net()), "late": torch.ones(2)}
    module = models.Net()
    load_tensors(module, captured_state, added=["late"])
    assert torch.equal(dict(module.named_buffers())["late"], torch.ones(2))
    with pytest.raises(MismatchError, match="late is gone"):
        load_tensors(models.Net(), captured_state)
