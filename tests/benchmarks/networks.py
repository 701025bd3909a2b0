"""The models that steps are measured on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

MODELS = {
    "mlp": "10 M parameters, batch 128",
    "cnn": "small, with batch norm, batch 64 of 32x32",
    "resnet50": "24 M parameters in 161 tensors, batch 16 of 64x64",
    "transformer": "160 layers with dropout, 1,920 tensors, batch 4 of 16x64",
    "deep": "2,000 tiny layers, 4,000 tensors, batch 32",
}
OPTIMIZERS: dict[str, dict[str, bool]] = {
    "default": {},
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False, "fused": False},
}
_EXAMPLE = Path(__file__).parents[2] / "examples" / "resnet50" / "model.py"


class Tiny(nn.Module):
    """A chain of tiny layers around each of which the values can pass, so that no gradient vanishes.

    Args:
        tensors: number of parameters, two for each layer.
    """

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(tensors // 2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh() / len(self.layers)
        return x


class Net(pl.LightningModule):
    """One of the models; its loss is the mean square of its output, its learning rate too small to change its nature.

    Args:
        kind: a name in `MODELS`, or ``tiny:N`` with N parameters.
        optimizer: a name in `OPTIMIZERS`.
        batch: samples, instead of the model's own number.
        image: height and width of images, instead of the model's own.
    """

    def __init__(self, kind: str, optimizer: str = "default", batch: int | None = None, image: int | None = None):
        super().__init__()
        self.save_hyperparameters()
        name, _, number = kind.partition(":")
        self.net: nn.Module
        self.shape: tuple[int, ...]
        self.net, self.shape = getattr(self, f"_{name}")(*map(int, filter(None, [number])))
        if image is not None and len(self.shape) == 4:
            self.shape = (*self.shape[:2], image, image)
        if batch is not None:
            self.shape = (batch, *self.shape[1:])

    def _mlp(self) -> Any:
        wide = (nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU())
        return nn.Sequential(*wide, nn.Linear(1024, 1000)), (128, 1024)

    def _cnn(self) -> Any:
        first = (nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU())
        second = (nn.Conv2d(32, 64, 3, 2), nn.BatchNorm2d(64), nn.ReLU())
        return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)), (64, 3, 32, 32)

    def _resnet50(self) -> Any:
        spec = importlib.util.spec_from_file_location("resnet50_example", _EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        return example.ResNet50(num_classes=20), (16, 3, 64, 64)

    def _transformer(self) -> Any:
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        return nn.TransformerEncoder(layer, 160), (4, 16, 64)

    def _deep(self) -> Any:
        return Tiny(4000), (32, 16)

    def _tiny(self, tensors: int) -> Any:
        return Tiny(tensors), (32, 16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).float().pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-6, **OPTIMIZERS[self.hparams["optimizer"]])
