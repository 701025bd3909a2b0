"""The tensors of a module under the names that a bundle gives them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

_COMPILED = "_orig_mod."


def parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter under every name it has; the wrapper of ``torch.compile`` leaves no trace in names."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name.replace(_COMPILED, ""), parameter


def unique_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once, under its first name."""
    for name, parameter in module.named_parameters():
        yield name.replace(_COMPILED, ""), parameter


def buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every buffer under every name it has."""
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield name.replace(_COMPILED, ""), buffer


def has_buffer(module: nn.Module, name: str) -> bool:
    """Whether there is a place for such a buffer, be it None."""
    path, _, leaf = name.rpartition(".")
    home = dict(submodules(module)).get(path)
    return home is not None and leaf in home._buffers


def replace_buffer(module: nn.Module, name: str, value: Tensor | None) -> None:
    """Put another tensor, such as one of another size, in a buffer's place."""
    path, _, leaf = name.rpartition(".")
    dict(submodules(module))[path]._buffers[leaf] = value


def volatile_buffers(module: nn.Module) -> set[str]:
    """Names of the non-persistent buffers: code makes them anew, so only what changed in them is state."""
    return {
        f"{path}.{name}".replace(_COMPILED, "").lstrip(".")
        for path, submodule in module.named_modules(remove_duplicate=False)
        for name in submodule._non_persistent_buffers_set
    }


def submodules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every submodule under every name; the root's is empty."""
    for name, submodule in module.named_modules(remove_duplicate=False):
        yield f"{name}.".replace(_COMPILED, "").rstrip("."), submodule
