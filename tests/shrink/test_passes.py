"""What is left of a bundle: no more than its fault needs, and enough for a green test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import nets
import pytest
import torch
from inline import Inline

from pytest_nancapture.bundle.manifest import BATCH, RNG, WEIGHTS, Healed
from pytest_nancapture.bundle.tensors.file import read_tensors
from pytest_nancapture.shrink import shrinker
from pytest_nancapture.shrink.pinning.fresh import heal_afresh

if TYPE_CHECKING:
    from pytest_nancapture import Bundle


def tensors(bundle: Bundle, file: str) -> dict[str, torch.Tensor]:
    layouts = {WEIGHTS: bundle.manifest.module.layouts, BATCH: bundle.manifest.batch.layouts, RNG: {}}
    return read_tensors(bundle.path / file, layouts[file])


def shapes(bundle: Bundle) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors(bundle, BATCH).values()]


def test_one_sample(capture: Any, shrunk: Any, mended: Any) -> None:
    """The sample at fault is kept, one that stays healthy with it, and neither weights nor random states."""
    bundle = capture(nets.OneSample())
    result = shrunk(bundle)

    x, length = tensors(result.bundle, BATCH).values()
    assert length.tolist().count(0) == 1
    assert len(x) == len(length) <= 2
    assert tensors(result.bundle, WEIGHTS) == {} == tensors(result.bundle, RNG)
    assert mended(result.bundle) == "finite"
    assert f"{len(x)} of 16 samples kept" in result.kept
    assert "2 of 2 weights are as the code initialises them" in result.kept
    assert "the random state is that of seed 0" in result.kept


def test_two_samples(capture: Any, shrunk: Any, mended: Any) -> None:
    """A fault between two samples keeps both, and no others that are not needed."""
    x, length = nets.batch()
    x[7] = x[6]
    result = shrunk(capture(nets.TwoSamples(), [(x, length)]))

    kept = next(iter(tensors(result.bundle, BATCH).values()))
    assert 2 <= len(kept) <= 3
    assert any(torch.equal(kept[i], kept[i + 1]) for i in range(len(kept) - 1))
    assert mended(result.bundle) == "finite"


def test_weights_that_matter(capture: Any, shrunk: Any, mended: Any) -> None:
    """Only the layer that overflows is stored; the others are as the code initialises them."""
    module = nets.Weighty()
    torch.nn.init.constant_(module.big.weight, 60.0)
    result = shrunk(capture(module, [(torch.ones(4, 4), torch.ones(4))]))

    assert list(tensors(result.bundle, WEIGHTS)) == ["big.weight"]
    initial = result.bundle.manifest.module.initial
    assert sorted(initial.all_names()) == ["big.bias", "layer.bias", "layer.weight", "other.bias", "other.weight"]
    assert any(sentence.startswith("weights kept") and "big.weight" in sentence for sentence in result.kept)
    assert mended(result.bundle) == "finite"


def test_a_rare_draw(capture: Any, shrunk: Any, mended: Any) -> None:
    """The random state stays where the fault hangs on it."""
    torch.manual_seed(1)
    result = shrunk(capture(nets.Drawn(), [nets.batch() for _ in range(600)]))

    assert tensors(result.bundle, RNG) != {}
    assert "random state kept: the fault depends on it, and did not come under any seed that was tried" in result.kept
    assert mended(result.bundle) == "finite"


def test_nothing_to_learn(capture: Any, shrunk: Any, mended: Any) -> None:
    """A fix that leaves zeros passes with the smaller bundle, as with the captured one."""
    bundle = capture(nets.Masked(), [(nets.batch()[0], torch.zeros(16))])
    result = shrunk(bundle)

    nothing = Healed(learns=False, idle=("layer.weight", "layer.bias"))
    assert [each.fault.healed for each in (bundle, result.bundle)] == [nothing, nothing]
    assert [mended(bundle), mended(result.bundle)] == ["finite", "finite"]


def test_nothing_to_learn_of_a_bundle_that_does_not_say(capture: Any) -> None:
    """A pin that leaves a bundle as it is finds out what its capture did not."""
    bundle = capture(nets.Masked(), [(nets.batch()[0], torch.zeros(16))], settings={"trace": False})
    assert bundle.fault.healed is None
    assert heal_afresh(bundle.path, "cpu") == Healed(learns=False, idle=("layer.weight", "layer.bias"))


def test_large_values(capture: Any, shrunk: Any, mended: Any) -> None:
    """What is large in the batch is cut, or noise, and the mask with it; recipes take its place."""
    generator = torch.Generator().manual_seed(3)
    image = torch.randn(6, 3, 32, 32, generator=generator)
    mask = (torch.rand(6, 32, 32, generator=generator) < 0.5).float()
    mask[2] = 0
    result = shrunk(capture(nets.Wide(), [(image, mask)]))

    assert result.after < 8000 < result.before
    assert mended(result.bundle) == "finite"


def test_micro_batches(capture: Any, shrunk: Any, mended: Any) -> None:
    """Of an accumulated window the guilty micro-batch is kept, and the update follows on it."""
    good = (nets.batch()[0], torch.ones(16))
    data = [good, good, nets.batch(), *[good] * 5]
    result = shrunk(capture(nets.OneSample(), data, accumulate_grad_batches=4))

    manifest = result.bundle.manifest
    assert [micro.batch_idx for micro in manifest.batch.window] == [2]
    assert manifest.fault.batch_idx == 2
    assert manifest.trainer.accumulate_grad_batches == 1
    assert len(manifest.fault.losses) == 1
    assert mended(result.bundle) == "finite"


def test_graph(capture: Any, shrunk: Any, mended: Any) -> None:
    """Whatever is left of nodes and edges, every edge has its nodes."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(12, 4, generator=generator)
    edges = torch.randint(11, (2, 100), generator=generator)
    result = shrunk(capture(nets.Graph(), [(x, edges)]))

    nodes, left = tensors(result.bundle, BATCH).values()
    assert int(left.max()) < len(nodes)
    assert mended(result.bundle) == "finite"


def test_lists(capture: Any, shrunk: Any) -> None:
    """Python lists of samples are cut together."""
    images = [torch.randn(3 + i, 4) for i in range(6)]
    images[4][0, 0] = float("inf")
    result = shrunk(capture(nets.Lists(), [(images, [f"name {i}" for i in range(6)])]))

    assert len(tensors(result.bundle, BATCH)) < 6


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_bad_input(capture: Any, shrunk: Any, mended: Any, value: str) -> None:
    """A bad value of the batch is kept, and so is a good one."""
    x, target = nets.batch()
    target[5] = float(value)
    result = shrunk(capture(nets.NanData(), [(x, target)]))

    _, kept = tensors(result.bundle, BATCH).values()
    assert [str(number) for number in kept.tolist()].count(value) == 1
    assert mended(result.bundle) == "finite"


def test_bad_weights(capture: Any, shrunk: Any) -> None:
    """Weights that were bad before the step are what the bundle is about."""
    module = nets.OneSample()
    with torch.no_grad():
        module.layer.weight[0, 0] = float("nan")
    result = shrunk(capture(module, [(torch.ones(8, 4), torch.ones(8))]))

    assert "layer.weight" in tensors(result.bundle, WEIGHTS)
    assert result.result["culprit"]["phase"] == "weights"


def test_shrinking_again_changes_nothing(capture: Any, shrunk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shrunk bundle is a bundle: it can be surveyed and replayed, and nothing more is found in it."""
    first = shrunk(capture(nets.OneSample()))
    monkeypatch.setattr(shrinker, "Pool", Inline)
    again = shrinker.shrink(first.bundle, first.bundle.path.parent / "again")

    assert again.after == first.after
