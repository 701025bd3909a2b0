"""The rooms, and who may import whom."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pytest_nancapture"
ROOMS = ("errors", "bundle", "step", "diagnose", "capture", "loops", "replay", "shrink", "plugin", "cli")
MAY_IMPORT = {
    "__init__": {"errors", "bundle", "diagnose", "loops", "replay"},
    "errors": set(),
    "bundle": {"errors"},
    "step": {"errors", "bundle", "loops"},
    "diagnose": {"errors", "bundle", "step"},
    "capture": {"errors", "bundle", "step", "diagnose", "loops"},
    "loops": {"errors", "bundle", "step", "diagnose", "capture", "replay"},
    "replay": {"errors", "bundle", "step", "diagnose", "loops"},
    "shrink": {"errors", "bundle", "step", "replay", "diagnose"},
    "plugin": {"errors", "bundle", "replay", "diagnose", "__init__"},
    "cli": {"errors", "bundle", "replay", "diagnose", "shrink", "__init__"},
}
START_UP = [
    *PACKAGE.glob("*.py"),
    *(PACKAGE / "plugin").glob("*.py"),
    *(
        PACKAGE / "bundle" / f"{name}.py"
        for name in ("__init__", "manifest", "schema", "bundle", "describe", "folder", "paths", "text")
    ),
    PACKAGE / "bundle" / "values" / "__init__.py",
    PACKAGE / "bundle" / "values" / "outline.py",
    PACKAGE / "diagnose" / "culprit.py",
    *(PACKAGE / "replay" / f"{name}.py" for name in ("__init__", "hooks", "result")),
    *(PACKAGE / "shrink" / "pinning").glob("*.py"),
    *(
        PACKAGE / "shrink" / f"{name}.py"
        for name in ("__init__", "command", "display", "fresh", "into", "resume", "shrinker")
    ),
    *(PACKAGE / "shrink" / "candidate" / f"{name}.py" for name in ("__init__", "fault", "plan")),
]
HEAVY = {"torch", "lightning", "pytorch_lightning", "numpy", "safetensors"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(nodes) -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def rooms_imported(source: str) -> set[str]:
    """Rooms named in any import of `source`; a name straight from the door counts as the door."""
    paths = [name.split(".") for name in imported(ast.walk(ast.parse(source)))]
    second = {path[1] if len(path) > 1 else "" for path in paths if path[0] == "pytest_nancapture"}
    return {name if name in ROOMS else "__init__" for name in second if name}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_what_lies_before_it(path):
    """Data flows one way: capture -> bundle -> replay -> diagnose / shrink -> plugin, cli."""
    room = room_of(path)
    assert rooms_imported(path.read_text()) - {room} - MAY_IMPORT[room] == set()


def test_the_check_of_imports_can_fail():
    """A capture that reached for the command line would be seen."""
    assert rooms_imported("from pytest_nancapture.cli import main") - MAY_IMPORT["capture"] == {"cli"}


@pytest.mark.parametrize("path", START_UP, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_on_the_start_up_path_imports_anything_heavy(path):
    """The plugin is loaded in every pytest run of the environment, so its imports at the top stay light."""
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {name.partition(".")[0] for name in imported(top)} & HEAVY == set()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_runs_what_a_bundle_brings(path):
    """No pickle, no eval, no exec, no torch.load: a bundle is data."""
    tree = ast.parse(path.read_text())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert called & {"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "marshal.loads"} == set()
    assert imported(ast.walk(tree)) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"} == set()
