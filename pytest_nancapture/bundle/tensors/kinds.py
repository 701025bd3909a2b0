"""Which kinds of tensors there are, and what of them has a form on disk."""

from __future__ import annotations

import torch
from torch import Tensor

NATIVE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What every safetensors release in the supported range stores; other dtypes go as bytes with a layout."""

COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
"""Sparse layouts that compress rows or columns, with the names of their two index tensors."""

_LAYOUTS = frozenset({torch.strided, torch.sparse_coo, *COMPRESSED})


def unwritable(tensor: Tensor) -> str:
    """Why `tensor` has no form on disk; empty where it has one."""
    if tensor.is_meta:
        return "it is on the meta device and has no values"
    if tensor.is_quantized:
        return f"quantized tensors ({tensor.dtype}) have no form in a bundle"
    if tensor.is_nested:
        return "nested tensors have no form in a bundle"
    layout = tensor.layout
    if layout not in _LAYOUTS:
        return f"tensors of layout {layout} have no form in a bundle"
    if layout is torch.strided and not _has_storage(tensor):
        return f"a {type(tensor).__qualname__} keeps its values in other tensors"
    return ""


def _has_storage(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


_TORCHS_OWN = frozenset({Tensor, torch.nn.Parameter})


def bare(tensor: Tensor) -> Tensor:
    """Its values, detached, of torch's own class: methods and ``__torch_function__`` of a subclass are others' code."""
    if type(tensor) in _TORCHS_OWN:
        return tensor.detach()
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.detach(tensor)


def bare_data(tensor: Tensor) -> Tensor:
    """The same, to be written into: autograd, and the tensor's version, know nothing of that."""
    if type(tensor) in _TORCHS_OWN:
        return tensor.data
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.data.__get__(tensor)  # type: ignore[attr-defined, no-any-return]


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share their memory, so that torch does not write into it."""
    if tensor.layout is not torch.strided:
        return False
    return any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def stored_values(tensor: Tensor) -> Tensor:
    """Those that a sparse tensor stores; a dense one itself."""
    if tensor.layout is torch.strided:
        return tensor
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
