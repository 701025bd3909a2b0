"""Numeric settings: read, applied, put back; and what a torch of another make does not know is passed over."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_nancapture.bundle import numerics
from pytest_nancapture.bundle.numerics import apply, numeric_settings, preserved

if TYPE_CHECKING:
    from collections.abc import Iterator

CHANGED: dict[str, Any] = {
    "default_dtype": "float64",
    "float32_matmul_precision": "medium",
    "deterministic_algorithms": [True, True],
    "cudnn_enabled": False,
    "cudnn_benchmark": True,
    "cudnn_deterministic": True,
    "cuda_matmul_allow_fp16_reduced_precision": False,
    "cuda_matmul_allow_bf16_reduced_precision": False,
    "sdp_flash": False,
    "sdp_mem_efficient": False,
    "sdp_math": False,
    "sdp_cudnn": False,
}

NEWER = hasattr(torch.backends, "fp32_precision")
"""Torch 2.9 brought other words for TF32."""


@pytest.fixture(autouse=True, name="_put_back")
def put_back() -> Iterator[None]:
    """With torch's own functions, so that no defect of the module under test reaches other tests."""
    threads, denormal = torch.get_num_threads(), numeric_settings()["flush_denormal"]
    backends = [
        (torch.backends.cudnn, ("enabled", "benchmark", "deterministic", "allow_tf32")),
        (
            torch.backends.cuda.matmul,
            ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
        ),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, names in backends for name in names]
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(denormal)
    for owner, name, value in before:
        setattr(owner, name, value)
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(True)


def test_settings_are_json() -> None:
    """They are written into bundle.json as they are, and none that this torch has is left out."""
    settings = numeric_settings()
    assert settings == json.loads(json.dumps(settings, allow_nan=False))
    newer = [] if NEWER else [name for name in numerics._SETTINGS if name.endswith("fp32_precision")]
    assert [name for name in numerics._SETTINGS if name not in newer] == [*settings]
    assert (settings["default_dtype"], settings["float32_matmul_precision"]) == ("float32", "highest")


@pytest.mark.parametrize("name", CHANGED)
def test_a_setting_that_is_applied_is_in_force(name: str) -> None:
    """Each setting by itself: applied, read back, and put back at the end."""
    before = numeric_settings()
    assert CHANGED[name] != before[name]
    with preserved():
        apply({name: CHANGED[name]})
        assert CHANGED[name] == numeric_settings()[name]
    assert before == numeric_settings()


def test_all_settings_at_once() -> None:
    """They don't undo one another, and all are put back, also after an error."""
    before = numeric_settings()
    with suppress(KeyError), preserved():
        apply(CHANGED)
        assert {name: numeric_settings()[name] for name in CHANGED} == CHANGED
        raise KeyError
    assert before == numeric_settings()


def test_the_default_dtype_is_torchs() -> None:
    """It is what code that makes tensors gets."""
    with preserved():
        apply({"default_dtype": "float64"})
        assert torch.float64 is torch.ones(1).dtype
    assert torch.float32 is torch.ones(1).dtype


def test_tf32_in_the_older_words() -> None:
    """Turned on by one function, it is read from several places, and turned off in all."""
    with preserved():
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = False
        captured = numeric_settings()
    assert (captured["cuda_matmul_allow_tf32"], captured["cudnn_allow_tf32"]) == (True, False)
    with preserved():
        apply(captured)
        assert captured == numeric_settings()
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (True, False)
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, True)


@pytest.mark.skipif(not NEWER, reason="this torch has no fp32_precision")
def test_tf32_in_the_newer_words() -> None:
    """Where they were used torch refuses to read the older ones; nothing is lost by it, in either direction."""
    captured = {}
    with preserved():
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        captured = numeric_settings()
        assert "cuda_matmul_allow_tf32" not in captured
        with preserved():
            apply({"float32_matmul_precision": "highest", "cuda_matmul_allow_tf32": False})
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"
    with preserved():
        apply(captured)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"


def test_denormals() -> None:
    """Flushed or not is a setting too, and only arithmetic tells."""
    with preserved():
        apply({"flush_denormal": True})
        assert numeric_settings()["flush_denormal"]
        apply({"flush_denormal": False})
        assert not numeric_settings()["flush_denormal"]


def test_threads() -> None:
    """The number of threads decides the order of sums."""
    threads = torch.get_num_threads()
    with preserved():
        apply({"threads": threads + 1})
        assert threads + 1 == torch.get_num_threads()
    assert threads == torch.get_num_threads()


def test_settings_left_alone_stay_alone() -> None:
    """Nothing is set that was not changed: some settings warn when they are touched."""
    touched: list[str] = []
    original = dict(numerics._SETTINGS)
    try:
        for name, (get, _) in original.items():
            numerics._SETTINGS[name] = (get, lambda _, name=name: touched.append(name))
        with preserved():
            pass
    finally:
        numerics._SETTINGS.update(original)
    assert touched == []


@pytest.mark.parametrize(
    "settings",
    [
        {"of_a_later_torch": True},
        {"default_dtype": "float33"},
        {"default_dtype": "load"},
        {"default_dtype": 3},
        {"float32_matmul_precision": "exact"},
        {"deterministic_algorithms": []},
        {"deterministic_algorithms": None},
        {"threads": -1},
        {"threads": "many"},
        {"flush_denormal": "yes"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:exact is not one of:UserWarning")
def test_what_this_torch_does_not_know(settings: dict[str, Any]) -> None:
    """Names and values from elsewhere change nothing, and those after them are applied all the same."""
    before = numeric_settings()
    with preserved():
        apply({**settings, "cudnn_benchmark": True})
        assert {**before, "cudnn_benchmark": True} == numeric_settings()


def test_a_setting_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left out, as on a torch that lacks it."""

    def gone() -> Any:
        raise AttributeError("gone")

    monkeypatch.setitem(numerics._SETTINGS, "sdp_flash", (gone, lambda _: None))
    assert "sdp_flash" not in numeric_settings()
    with preserved():
        pass
