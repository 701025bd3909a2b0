"""The hooks of this plugin, for ``conftest.py``: how to build what a bundle's manifest cannot say.

As with every hook of pytest, a ``conftest.py`` speaks for the bundles in its own folder and below. For a bundle outside
rootdir those of rootdir speak; one that lies in a bundle is never loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import nn

    from pytest_nancapture.bundle.bundle import Bundle


@pytest.hookspec(firstresult=True)
def pytest_nancapture_module(bundle: Bundle) -> nn.Module | None:
    """Build the module to replay `bundle` with; its weights are overwritten. None: build it as the bundle says.

    Example:
        ::

            def pytest_nancapture_module(bundle):
                if bundle.manifest.module.target == "shop.model:Net":
                    return Net(tokenizer=load_tokenizer())
    """


@pytest.hookspec(firstresult=True)
def pytest_nancapture_batch(bundle: Bundle, batch: Any) -> Any | None:
    """Change one micro-batch after it was read and before the step sees it. None: take it as it was captured."""


@pytest.hookspec
def pytest_nancapture_trainer_kwargs(bundle: Bundle) -> dict[str, Any] | None:
    """Arguments for the replay's Trainer, over those the bundle asks for.

    The answers of several implementations are merged; that of the ``conftest.py`` nearest to the bundle wins. A
    ``datamodule`` among them is what the module's code finds under ``trainer.datamodule``, as the hook has set it up:
    it gives no batch.
    """
