"""The readable name of a pinned fault: module, operation, fault, variable."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from fake_bundles import fake_manifest

from pytest_nancapture.diagnose.explain import explain, explain_gradient
from pytest_nancapture.shrink.pinning.name import fault_word, module_word, readable_name, short_op

ZERO = "division by zero: the divisor is 0 in its only place; keep it above 0, as with clamp(min=...)"


def name(target: str = "shop.model:ResNet50", file: str | None = "shop/model.py", **culprit: Any) -> str:
    return readable_name(fake_manifest(module={"target": target, "file": file}), {"phase": "forward", **culprit})


@pytest.mark.parametrize(
    ("culprit", "expected"),
    [
        (
            {
                "op": "aten.div.Tensor",
                "source": "mean_loss = loss / count",
                "columns": [25, 36],
                "explanation": ZERO,
            },
            "resnet50-div-zero-count",
        ),
        (
            {"op": "aten.std.correction", "source": "z = adv / adv.std()", "explanation": "unbiased spread of 1 value"},
            "resnet50-std-single-adv",
        ),
        (
            {
                "op": "aten._softmax.default",
                "source": "h = self.attn(h, h, h, key_padding_mask=pad)",
                "explanation": "softmax over a row that is entirely -inf: row 3 of 8; leave an entry in each",
            },
            "resnet50-softmax-empty-row-attn",
        ),
        (
            {
                "phase": "backward",
                "op": "aten.sqrt.default",
                "source": "dist = torch.sqrt(gap)",
                "explanation": "the gradient of sqrt at 0 is infinite (in 1 of 3 places); add an eps under the root",
            },
            "resnet50-sqrt-grad-zero-gap",
        ),
        ({"op": "aten.div.Tensor"}, "resnet50-div-nan"),
        ({"op": "aten.mm.default", "source": "x @ weights"}, "resnet50-mm-nan-weights"),
        ({"source": "logits[mask] = -math.inf"}, "resnet50-nan-logits"),
        (
            {"phase": "input", "explanation": "batch['x'] holds 3 NaN among 64 values, in sample 2 of 16"},
            "resnet50-input-nan-x",
        ),
        ({"phase": "input", "explanation": "batch[0] holds 3 Inf among 64 values"}, "resnet50-input-inf-0"),
        ({"phase": "input"}, "resnet50-input-nan"),
        (
            {
                "phase": "weights",
                "explanation": "encoder.fc.weight held 1 NaN and 2 Inf among 64 values before the step began",
            },
            "resnet50-weights-inf-fc-weight",
        ),
        ({}, "resnet50-step-812"),
    ],
)
def test_readable_name(culprit: dict[str, Any], expected: str) -> None:
    """What is known of the fault is in the name; where nothing is, the step's number is."""
    assert expected == name(**culprit)


def test_a_bundle_without_a_culprit() -> None:
    """It is named by its step."""
    assert readable_name(fake_manifest(), None) == "shop-step-812"


@pytest.mark.parametrize(
    "culprit",
    [
        {"op": "aten." + "x_" * 200, "source": "a / " + "b" * 300, "explanation": ZERO},
        {"op": "../../etc", "source": "x / ../..", "explanation": ZERO},
        {"op": ["x"], "phase": 3, "columns": "ab", "source": None},
        {"op": "aten.div.Tensor", "source": "损失 / 数", "columns": [1, "x"]},
        {"op": "\x1b[2J", "source": "(" * 5000, "explanation": "\n"},
    ],
)
@pytest.mark.parametrize("target", ["m:" + "VeryLongClassName" * 9, "m:损失", ":", "", "m:Übung", "m:__X__"])
def test_a_name_is_always_a_plain_folder(culprit: dict[str, Any], target: str) -> None:
    """A bundle is data from elsewhere: whatever it says, the name is letters, digits and dashes, at most 60."""
    found = name(target, None, **culprit)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", found)
    assert len(found) <= 60


@pytest.mark.parametrize(
    ("target", "file", "expected"),
    [
        ("a.b:ResNet50", None, "resnet50"),
        ("a.b:LitResNet50", None, "resnet50"),
        ("a.b:UNet", None, "unet"),
        ("a.b:EfficientNetV2", None, "efficientnet-v2"),
        ("a.b:MaskRCNN", None, "mask-rcnn"),
        ("a.b:VQVAE2D", None, "vqvae2d"),
        ("a.b:GPT2LMHeadModel", None, "gpt2lm-head"),
        ("a.b:TextClassifier", None, "text-classifier"),
        ("a.b:Outer.Inner", None, "inner"),
        ("a.b:Modèle", None, "modele"),
        ("shop.model:Net", "shop/model.py", "shop"),
        ("__main__:LitModel", "examples/resnet50/train.py", "resnet50"),
        ("model:Classifier", "examples/resnet50/model.py", "resnet50"),
        ("pkg.vqvae.lightning_module:PLModule", None, "vqvae"),
        ("m:Model", "cases/c21_triplet_no_active.py", "c21-triplet-no-active"),
        ("__main__:Net", "train.py", "net"),
        ("__main__:LitTinyNet", "train.py", "tinynet"),
        ("__main__:LitModule", "train.py", "module"),
        ("__main__:LitModel", "train.py", "model"),
        ("__main__:Net", "src/models/__init__.py", "net"),
        ("m:损失", None, "m"),
        ("model:损失", None, "module"),
    ],
)
def test_module_word(target: str, file: str | None, expected: str) -> None:
    """The class, unless its name says nothing; then its file, or the nearest folder that says something."""
    assert expected == module_word(target, file)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("aten.div.Tensor", "div"),
        ("aten.div_.Tensor", "div"),
        ("aten._softmax.default", "softmax"),
        ("aten._log_softmax.default", "log_softmax"),
        ("aten.nll_loss_forward.default", "nll_loss"),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", "attention"),
        ("aten.linalg_vector_norm.default", "vector_norm"),
        ("aten._to_copy.default", "cast"),
        ("aten._linalg_svd.default", "svd"),
        ("aten._weight_norm_interface.default", "weight_norm"),
        ("mylib.splat.default", "splat"),
        ("odd", "odd"),
    ],
)
def test_short_op(op: str, expected: str) -> None:
    """Without the library, the overload and what else a person would not say."""
    assert expected == short_op(op)


X = torch.tensor([-1.0, 0.0, 2.0])
NAN, INF = torch.tensor(float("nan")), torch.tensor(float("inf"))


@pytest.mark.parametrize(
    ("sentence", "word"),
    [
        (explain("aten.div.Tensor", [X, X], {}, X / X), "zero"),
        (explain("aten.div.Tensor", [torch.ones(3), X], {}, 1 / X), "zero"),
        (explain("aten.reciprocal.default", [X], {}, 1 / X), "zero"),
        (explain("aten.log.default", [X.clamp(min=0)], {}, X.clamp(min=0).log()), "zero"),
        (explain("aten.log.default", [X], {}, X.log()), "negative"),
        (explain("aten.sqrt.default", [X], {}, X.sqrt()), "negative"),
        (explain("aten.rsqrt.default", [X.clamp(min=0)], {}, X.clamp(min=0).rsqrt()), "zero"),
        (explain("aten.exp.default", [X * 1e4], {}, (X * 1e4).exp()), "overflow"),
        (explain("aten.pow.Tensor_Scalar", [X, -1], {}, X**-1), "zero"),
        (explain("aten.pow.Tensor_Scalar", [X, 0.5], {}, X**0.5), "negative"),
        (explain("aten._softmax.default", [-INF.expand(2, 3), 1, False], {}, NAN.expand(2, 3)), "empty-row"),
        (explain("aten.std.correction", [X[:1]], {}, NAN), "single"),
        (explain("aten.nll_loss_forward.default", [X, torch.tensor([-100]), None, 1, -100], {}, NAN), "ignored"),
        (explain("aten.mean.default", [X[:0]], {}, NAN), "empty"),
        (explain("aten.acos.default", [X], {}, X.acos()), "edge"),
        (explain("aten.sub.Tensor", [INF, INF], {}, NAN), "inf"),
        (explain("aten.mul.Tensor", [X, INF], {}, X * INF), "inf"),
        (explain("aten.xlogy.Tensor", [X, X], {}, torch.xlogy(X, X)), "zero"),
        (explain("aten.mm.default", [X * 1e38, X * 1e38], {}, INF), "overflow"),
        (explain("aten.foo.default", [X], {}, NAN), "nan"),
        (explain("aten.foo.default", [X], {}, INF), "inf"),
        (explain_gradient("aten.sqrt.default", [X, X], {}, X), "zero"),
        (explain_gradient("aten.acos.default", [X], {}, X), "edge"),
        (explain_gradient("aten.linalg_svd.default", [X], {}, X), "equal"),
        (explain_gradient("aten.linalg_eigh.default", [X], {}, X), "equal"),
        (explain_gradient("aten.logsumexp.default", [X], {}, X), "empty-row"),
        ("", "nan"),
        ("something new", "nan"),
    ],
)
def test_fault_word(sentence: str, word: str) -> None:
    """A word for each sentence that the diagnosis makes today."""
    assert word == fault_word({"explanation": sentence}, "nan")
