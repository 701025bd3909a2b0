"""Registers the stand-in accelerator, ``fake:0`` and ``fake:1``, in this process; it cannot be taken back."""

from __future__ import annotations

import types
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.cpp_extension import load

COUNT = 2


def register() -> None:
    """Build the extension, if that was not done before, and give the device its name and module."""
    torch.utils.rename_privateuse1_backend("fake")
    source = Path(__file__).with_name("backend.cpp")
    native = load("nancapture_fake_accelerator", [str(source)], extra_cflags=["-O0"])
    native.begin()
    module = types.ModuleType("torch.fake")

    def index_of(device: int | str | torch.device) -> int:
        return device if isinstance(device, int) else torch.device(device).index or 0

    def get_rng_state(device: int | str | torch.device = "fake") -> Tensor:
        return native.generator(index_of(device)).get_state()

    def set_rng_state(state: Tensor, device: int | str | torch.device = "fake") -> None:
        native.generator(index_of(device)).set_state(state)

    def manual_seed_all(seed: int) -> None:
        for index in range(COUNT):
            native.generator(index).manual_seed(seed)

    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: COUNT,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "synchronize": lambda device=None: None,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": lambda seed: native.generator(torch.accelerator.current_device_index()).manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    vars(module).update(functions)
    torch._register_device_module("fake", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
