"""The rooms, and who may import whom."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pytest_nancapture"
ORDER = (
    {"errors"},
    {"bundle"},
    {"step"},
    {"diagnose"},
    {"capture"},
    {"loops"},
    {"replay"},
    {"shrink", "report", "plugin", "__init__"},
    {"cli"},
)
"""A room imports only from itself and from rooms of an earlier row."""
ROOMS = set().union(*ORDER)
LOOPS = {"lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate"}
START_UP = [
    *PACKAGE.glob("*.py"),
    *(PACKAGE / "plugin").glob("*.py"),
    *(
        PACKAGE / "bundle" / f"{name}.py"
        for name in ("__init__", "manifest", "schema", "bundle", "describe", "folder", "load", "paths", "text")
    ),
    PACKAGE / "bundle" / "values" / "__init__.py",
    PACKAGE / "bundle" / "values" / "outline.py",
    PACKAGE / "diagnose" / "culprit.py",
    *(PACKAGE / "replay" / f"{name}.py" for name in ("__init__", "hooks", "result")),
    *(PACKAGE / "shrink" / "pinning").glob("*.py"),
    *(
        PACKAGE / "shrink" / f"{name}.py"
        for name in ("__init__", "command", "display", "into_place", "options", "resume", "search", "shrinker")
    ),
    *(PACKAGE / "shrink" / "candidate" / f"{name}.py" for name in ("__init__", "fault", "plan")),
]
HEAVY = {"torch", "lightning", "pytorch_lightning", "numpy", "safetensors"}


MODULES = sorted(PACKAGE.rglob("*.py"))
EACH_MODULE = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def before(room: str) -> set[str]:
    """The rooms that `room` may import from, itself among them."""
    row = next(i for i, rooms in enumerate(ORDER) if room in rooms)
    return {room}.union(*ORDER[:row])


def imported(nodes) -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def all_imported(source: str) -> set[str]:
    """Whatever is imported anywhere: at the top, in a function, under TYPE_CHECKING."""
    return imported(ast.walk(ast.parse(source)))


def rooms_imported(source: str) -> set[str]:
    """Rooms named in any import of `source`; a name straight from the door counts as the door."""
    paths = [name.split(".") for name in all_imported(source)]
    second = {path[1] if len(path) > 1 else "" for path in paths if path[0] == "pytest_nancapture"}
    return {name if name in ROOMS else "__init__" for name in second if name}


@EACH_MODULE
def test_a_room_imports_only_what_lies_before_it(path):
    """errors < bundle < step < diagnose < capture < loops < replay < shrink, report, plugin < cli."""
    room = room_of(path)
    rooms = rooms_imported(path.read_text())
    if room != "__init__":  # whose names are resolved when they are asked for
        assert rooms - before(room) == set()


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("capture", "from pytest_nancapture.cli import main"),
        ("step", "def late():\n    from pytest_nancapture.loops.lightning import callback"),
        ("diagnose", "if TYPE_CHECKING:\n    from pytest_nancapture.replay.result import ReplayResult"),
        ("plugin", "import pytest_nancapture.shrink.search"),
        ("bundle", "from pytest_nancapture import replay"),
    ],
)
def test_the_check_of_imports_can_fail(room, source):
    """An upward import is seen at the top, in a function, for types, sideways, and through the door."""
    assert rooms_imported(source) - before(room) != set()


def test_no_modules_import_each_other():
    """Nor in a circle of several, whatever the kind of import."""
    assert circles({module_of(path): path.read_text() for path in MODULES if path.parent != PACKAGE}) == []


def test_the_search_for_circles_can_fail():
    """Two modules, one of which imports the other for its types only, are one."""
    pair = {
        "p.a": "def late():\n    from p import b",
        "p.b": "if TYPE_CHECKING:\n    from p.a import late",
        "p.c": "import p.a",
    }
    assert circles(pair) == ["p.a -> p.b -> p.a"]


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


def circles(sources: dict[str, str]) -> list[str]:
    """Shortest circles of imports, each told once, from its first module in the alphabet."""
    graph = {name: sorted(all_imported(source) & sources.keys() - {name}) for name, source in sources.items()}
    found = set()
    for start in graph:
        ways = [[start]]
        seen = set()
        while ways:
            way = ways.pop(0)
            for following in graph[way[-1]]:
                if following == start and start == min(way):
                    found.add(" -> ".join([*way, start]))
                    ways.clear()
                    break
                if following not in seen:
                    seen.add(following)
                    ways.append([*way, following])
    return sorted(found)


@EACH_MODULE
def test_only_the_rooms_of_loops_name_a_training_library(path):
    """A second loop adds a folder, and touches nothing else."""
    names = {name.partition(".")[0] for name in all_imported(path.read_text())}
    assert room_of(path) == "loops" or names & LOOPS == set()


def test_no_room_is_crowded():
    """At most a dozen modules side by side, besides the door of the room, and none over 400 lines."""
    crowded = {folder: len(list(folder.glob("[!_]*.py"))) for folder in {path.parent for path in MODULES}}
    assert {folder: count for folder, count in crowded.items() if count > 12} == {}
    assert [path for path in MODULES if len(path.read_text().splitlines()) > 400] == []


@pytest.mark.parametrize("path", START_UP, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_on_the_start_up_path_imports_anything_heavy(path):
    """The plugin is loaded in every pytest run of the environment, so its imports at the top stay light."""
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {name.partition(".")[0] for name in imported(top)} & HEAVY == set()


@EACH_MODULE
def test_nothing_runs_what_a_bundle_brings(path):
    """No pickle, no eval, no exec, no torch.load: a bundle is data."""
    tree = ast.parse(path.read_text())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert called & {"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "marshal.loads"} == set()
    assert imported(ast.walk(tree)) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"} == set()
