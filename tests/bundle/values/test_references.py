"""Classes and functions by name: found again in today's code, in no other, and never outside of the repository."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_nancapture.bundle.values.references import LiveResolver, Reference, Resolver, refer, repository_root
from pytest_nancapture.errors import RebuildError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

HERE = "tests/bundle/values/test_references.py"


class Outer:
    class Inner:
        pass

    def method(self) -> None:
        pass


def function() -> None:
    pass


@pytest.fixture(autouse=True, name="_modules")
def modules() -> Iterator[None]:
    """Modules that a test imports are gone after it, and so are its additions to the path."""
    path, before = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.startswith("shop"):
            del sys.modules[name]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With a package, a module beside it, and a script."""
    files = {
        "shop/__init__.py": "",
        "shop/models.py": "class Net:\n    place = __file__\n",
        "shop/broken.py": "1 / 0\n",
        "shop/lacking.py": "import shop_of_somebody_else\n",
        "shop_alone.py": "class Net: pass\n",
        "train.py": "class Net: pass\n",
        "notes.txt": "",
    }
    for name, text in files.items():
        path = tmp_path / "repo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "repo" / ".git").mkdir()
    return tmp_path / "repo"


@pytest.mark.parametrize(
    ("found", "name"),
    [(Outer, "Outer"), (Outer.Inner, "Outer.Inner"), (function, "function"), (Outer.method, "Outer.method")],
)
def test_refer_to_ones_own_code(found: Any, name: str) -> None:
    """The module's name and the qualified one, with the source file relative to the repository."""
    reference = refer(found)
    assert Reference(f"{__name__}:{name}", HERE) == reference
    assert found is LiveResolver().resolve(reference.target, reference.file)


@pytest.mark.parametrize(
    ("found", "target"),
    [
        (torch.nn.Linear, "torch.nn.modules.linear:Linear"),
        (torch.relu, "torch:relu"),
        (torch.nn.functional.gelu, "torch._C._nn:gelu"),
        (collections.OrderedDict, "collections:OrderedDict"),
        (dict, "builtins:dict"),
        (os.path.join, f"{os.path.__name__}:join"),
    ],
)
def test_refer_to_installed_code(found: Any, target: str) -> None:
    """It has no file: where it lies differs from machine to machine."""
    assert Reference(target) == refer(found)
    assert found is Resolver().resolve(target)


def test_refer_without_a_repository(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is then relative to where the training was started if it lies below, else to its package's folder."""
    (repository / ".git").rmdir()
    monkeypatch.chdir(repository)
    monkeypatch.syspath_prepend(repository)
    assert Reference("shop.models:Net", "shop/models.py") == refer(Resolver().resolve("shop.models:Net"))
    monkeypatch.chdir(repository / "shop")
    assert Reference("shop_alone:Net", "shop_alone.py") == refer(Resolver().resolve("shop_alone:Net"))


def local() -> Any:
    class Local:
        pass

    return Local


class Shadowed:
    pass


OLD = Shadowed


def replaced() -> Any:
    """What took its place in the module under its name is something else."""
    globals()["Shadowed"] = function
    return OLD


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lambda: 1, "is defined inside of a function, so no import finds it"),
        (local, "local.<locals>.Local is defined inside of a function, so no import finds it"),
        (lambda: [].append, "has no name"),
        (lambda: torch.nn.Linear(1, 1), "has no name"),
        (lambda: 3, "has no name"),
        (replaced, f"{__name__}:Shadowed does not name it: it was made, renamed or replaced at run time"),
    ],
    ids=["lambda", "local", "bound", "instance", "number", "replaced"],
)
def test_what_has_no_reference(make: Any, message: str) -> None:
    """It is said at capture, not at the replay, why a thing cannot be found again."""
    with pytest.raises(ValueError, match=message.replace("<", r"\<")):
        refer(make())


def test_a_class_of_an_interactive_session() -> None:
    """No file holds it; seen in an interpreter that reads its program from the command line."""
    program = """if True:
        from pytest_nancapture.bundle.values.references import refer
        class Net: pass
        try: refer(Net)
        except ValueError as error: print(error)
    """
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "Net is defined in an interactive session, so no file holds it\n"


@pytest.mark.parametrize(
    "target",
    [
        *("", ":", "a", "a:", ":b", "a.b", "os.path", "a:b:c", "a:b()", "a b:c", "a:b c", "../a:b", "/etc/passwd:x"),
        *("a..b:c", ".a:b", "a:b.", "a:.b", "a:0", "a\n:b", "a:b\n", "os;x:y"),
    ],
)
def test_what_is_no_target(target: str) -> None:
    """Names and dots only, a colon between."""
    with pytest.raises(RebuildError, match=r"expected a target like 'package.module:Class', came"):
        Resolver().resolve(target)


def test_imported_by_name() -> None:
    """Installed code needs no file."""
    assert collections.OrderedDict is Resolver().resolve("collections:OrderedDict")


def test_found_by_its_file(repository: Path) -> None:
    """A package that cannot be imported is looked for below each place, and then can be."""
    place = repository.parent / "elsewhere"
    found = Resolver((place, repository)).resolve("shop.models:Net", "shop/models.py")
    assert str(repository / "shop" / "models.py") == found.place


def test_found_by_its_file_beside_others(repository: Path) -> None:
    """So can a module that is in no package."""
    assert Resolver((repository,)).resolve("shop_alone:Net", "shop_alone.py").__name__ == "Net"


def test_what_can_be_imported_is_not_looked_for(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's path goes before what the bundle says."""
    monkeypatch.syspath_prepend(repository)
    other = repository.parent / "other" / "shop"
    other.mkdir(parents=True)
    (other / "models.py").write_text("raise SystemExit")
    found = Resolver((other.parent,)).resolve("shop.models:Net", "shop/models.py")
    assert str(repository / "shop" / "models.py") == found.place


@pytest.mark.parametrize(
    ("target", "file", "message"),
    [
        (
            "shop.models:Gone",
            "shop/models.py",
            "shop.models:Gone: shop.models has no 'Gone'; if it was renamed, say so in",
        ),
        ("shop.models:Net.gone", "shop/models.py", "shop.models:Net.gone: Net has no 'gone'; if it was renamed"),
        (
            "shop.gone:Net",
            "shop/gone.py",
            "cannot import shop.gone: No module named 'shop'; its file shop/gone.py was found",
        ),
        ("shop.gone:Net", None, "cannot import shop.gone: No module named 'shop'"),
        (
            "shop.broken:Net",
            "shop/broken.py",
            "importing shop.broken from .* failed with ZeroDivisionError: division by zero",
        ),
        (
            "shop.lacking:Net",
            "shop/lacking.py",
            "importing shop.lacking from .* No module named 'shop_of_somebody_else'",
        ),
    ],
)
def test_what_is_not_there_any_more(repository: Path, target: str, file: str | None, message: str) -> None:
    """The error says what is missing and, where it can, what to do."""
    with pytest.raises(RebuildError, match=message):
        Resolver((repository,)).resolve(target, file)


def test_a_module_that_fails_when_imported(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it need not be looked for."""
    monkeypatch.syspath_prepend(repository)
    with pytest.raises(RebuildError, match=r"importing shop.broken failed with ZeroDivisionError: division by zero"):
        Resolver().resolve("shop.broken:Net")


@pytest.mark.parametrize(
    "file", ["/etc/x.py", "../x.py", "shop/../../x.py", "", ".", "c:\\x.py", "shop\\x.py", "C:/x.py"]
)
def test_no_file_outside(repository: Path, file: str) -> None:
    """A path that is absolute or leads upward is refused, whether there is a file or not."""
    (repository.parent / "x.py").write_text("raise SystemExit")
    if not file:
        assert Resolver((repository,)).resolve("collections:OrderedDict", file) is collections.OrderedDict
        return
    with pytest.raises(RebuildError, match="expected a source file relative to the repository, came"):
        Resolver((repository,)).resolve("shop.gone:Net", file)


def test_no_file_outside_through_a_link(repository: Path) -> None:
    """A link that leads out of the repository leads nowhere."""
    (repository.parent / "x.py").write_text("raise SystemExit")
    (repository / "link.py").symlink_to(repository.parent / "x.py")
    assert None is Resolver((repository,)).locate("link.py")
    assert repository / "train.py" == Resolver((repository,)).locate("train.py")


@pytest.mark.parametrize("file", ["notes.txt", "shop", "gone.py"])
def test_only_python_files_are_located(repository: Path, file: str) -> None:
    """Neither folders nor other files."""
    assert None is Resolver((repository,)).locate(file)


def test_a_script(repository: Path) -> None:
    """What a script defines is in the module that the loader makes of it; it is made once."""
    loaded: list[Path] = []

    def load(path: Path) -> ModuleType:
        loaded.append(path)
        return type(sys)("made")

    resolver = Resolver((repository,), load)
    for _ in range(2):
        with pytest.raises(RebuildError, match="__main__:Net: made has no 'Net'"):
            resolver.resolve("__main__:Net", "train.py")
    assert [repository / "train.py"] == loaded


def test_a_script_that_is_not_there(repository: Path) -> None:
    """The error says where it was looked for."""
    with pytest.raises(RebuildError) as caught:
        Resolver((repository,), lambda _: pytest.fail("nothing to load")).resolve("__main__:Net", "gone.py")
    expected = f"__main__:Net was defined in the script gone.py, which was found below none of {repository}; "
    assert expected + "run from the repository that holds it" == str(caught.value)


def test_where_code_was_at_capture(repository: Path) -> None:
    """The error says how to go there, and nothing is run from there unasked."""
    resolver = Resolver((repository,), lambda _: pytest.fail("nothing to load"), was_in="/x/code")
    for target in ("__main__:Net", "gone_away:Net"):
        with pytest.raises(
            RebuildError, match=r"it was in /x/code when it was captured: run pytest there, or set NANCA"
        ):
            resolver.resolve(target, "gone_away.py")


def test_code_that_was_typed_in(repository: Path) -> None:
    """No file holds it, and the error says what does."""
    with pytest.raises(RebuildError, match=r"^Net was typed into a notebook or an interactive session"):
        Resolver((repository,)).resolve("__main__:Net")


def test_the_live_resolver_takes_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the training process itself nothing is imported anew, and the script is ``__main__``."""
    live = type(sys)("shop_live")
    live.Net = Outer
    monkeypatch.setitem(sys.modules, "shop_live", live)
    monkeypatch.setitem(sys.modules, "__main__", live)
    assert Outer is LiveResolver().resolve("shop_live:Net")
    assert Outer is LiveResolver().resolve("__main__:Net", "train.py")


def test_repository_root(repository: Path) -> None:
    """The nearest folder above that holds ``.git``, be it a folder or, in a worktree, a file."""
    assert repository == repository_root(repository / "shop")
    assert repository == repository_root(repository)
    (repository / "shop" / ".git").write_text("gitdir: elsewhere")
    assert repository / "shop" == repository_root(repository / "shop" / "deep")
