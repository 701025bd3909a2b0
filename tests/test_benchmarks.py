"""The benchmarks, which nobody runs every day: each still starts, and the plot can be drawn. Nothing here is timed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
SCRIPTS = sorted(
    path for path in [*HERE.glob("benchmarks/*.py"), HERE / "gpu" / "run.py"] if "__main__" in path.read_text()
)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Loads a script as if it were run: what lies beside it can be imported, and is forgotten afterwards."""
    helpers = {path.stem for path in HERE.glob("benchmarks/*.py")}

    def loaded(path: Path) -> ModuleType:
        monkeypatch.syspath_prepend(path.parent)
        spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    before = {name: sys.modules.pop(name) for name in helpers & sys.modules.keys()}
    yield loaded
    for name in helpers & sys.modules.keys():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_each_starts(load, path, capsys):
    """It can be imported, and says how it is used."""
    module = load(path)
    with pytest.raises(SystemExit) as exit_:
        module.main(["--help"])
    assert exit_.value.code == 0
    assert "usage:" in capsys.readouterr().out


MACHINE = {"accelerator": None, "machine": "m", "threads": 2, "python": "3", "torch": "2", "lightning": "2"}
MEASURED = {
    "cuda": {
        "mlp": {"shares": {"this": [-0.01, 0.001, 0.02], "article": [0.2, 0.3, 0.4]}},
        "a<b": {"shares": {"this": [0.01], "anomaly mode": [12.0]}},
    },
    "cpu": {
        "mlp": {
            "medians": {"nothing": [1.0, 2.0, 3.0]},
            "inside": {"nothing": [0.0] * 3, "this": [0.001, 0.002, 0.003], "article": [0.3, 0.6, 0.9]},
        },
        "a<b": {"medians": {"nothing": [1.0]}, "inside": {"this": [0.01], "floor": [12.0], "anomaly mode": [0.0]}},
    },
}
"""Bars in each: four, of three guards."""


@pytest.mark.parametrize("device", MEASURED)
def test_the_plot(device, load, tmp_path):
    """Well-formed, with a bar for each guard that was measured, whatever the sign of its cost."""
    settings = {"device": device, "precision": "32"}
    results = {"machine": MACHINE, "settings": settings, "models": MEASURED[device]}
    (tmp_path / "x.json").write_text(json.dumps(results))
    load(HERE / "benchmarks" / "plot.py").main([str(tmp_path / "x.json"), str(tmp_path / "x.svg")])
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    legend = 3
    assert len(root.findall(f"{name}rect")) == legend + 4
    assert {"mlp", "a<b", "+0.1%", "+30.0%", "x 13.0"} <= {text.text for text in root.findall(f"{name}text")}
