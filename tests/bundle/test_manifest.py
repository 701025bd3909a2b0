"""bundle.json: written so that it can be diffed, read strictly, and refused with one clear error."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_bundles import fake_manifest, write_bundle

from pytest_nancapture.bundle import load as module
from pytest_nancapture.bundle.load import load_manifest
from pytest_nancapture.bundle.manifest import (
    FileRecord,
    InitialRecord,
    Manifest,
    MicroBatch,
    OptimizerRecord,
    PinRecord,
    StateRecord,
)
from pytest_nancapture.errors import BundleDamagedError, BundleError, BundleNotFoundError, BundleVersionError

STATE = ("batch", "files", "numerics", "optimizer", "rng", "trainer")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "step-000812-rank-0")


def rewrite(bundle: Path, *, honest: bool = True, **changes: Any) -> None:
    """Change top-level entries of bundle.json; `honest`: and the hash of the state with them, as an attacker would."""
    path = bundle / "bundle.json"
    data = {**json.loads(path.read_text()), **changes}
    if honest:
        state = json.dumps({name: data[name] for name in STATE}, sort_keys=True)
        data["state_sha256"] = hashlib.sha256(state.encode()).hexdigest()
    path.write_text(json.dumps(data))


def problem(bundle: Path, kind: type[BundleError] = BundleDamagedError) -> str:
    """The one error, which names the bundle first."""
    with pytest.raises(BundleError) as caught:
        load_manifest(bundle)
    assert kind is type(caught.value)
    assert str(bundle) == caught.value.path
    assert str(caught.value).startswith(f"{bundle}: ")
    return caught.value.problem


def test_what_is_written_is_read_back(bundle: Path) -> None:
    """Reading gives the very values that were written."""
    assert fake_manifest() == load_manifest(bundle)


def test_optional_sections_are_read_back(tmp_path: Path) -> None:
    """So do the sections that few bundles have."""
    files = dict.fromkeys(module.ALLOWED_FILES, b"")
    sections = {"optimizer": OptimizerRecord(states=({"dict": []},)), "pin": PinRecord(known=True)}
    bundle = write_bundle(tmp_path / "b", files=files, **sections)
    assert fake_manifest(files, **sections) == load_manifest(bundle)


def test_the_text_can_be_diffed() -> None:
    """Keys sorted, an entry a line, a last newline; the same manifest gives the same text."""
    text = fake_manifest().dumps()
    data = json.loads(text)
    assert json.dumps(data, indent=1, sort_keys=True) + "\n" == text
    assert fake_manifest().dumps() == text


def test_non_finite_numbers_are_not_written() -> None:
    """JSON has none, so a writer that lets one slip through must hear of it."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        fake_manifest(numerics={"scale": float("nan")}).dumps()


@pytest.mark.parametrize(("device", "kind"), [("cuda:1", "cuda"), ("cpu", "cpu")])
def test_device_kind(device: str, kind: str) -> None:
    """The kind of device is the device without its number."""
    assert kind == fake_manifest(environment={"device": device}).device_kind


def test_device_kind_where_none_is_given() -> None:
    """A bundle that names no device was captured on the CPU."""
    assert fake_manifest(environment={}).device_kind == "cpu"


@pytest.mark.parametrize("place", ["missing", "empty", "plain-file", "no-file/bundle"])
def test_not_a_bundle(tmp_path: Path, place: str) -> None:
    """No folder, one without bundle.json, or a file: there is no bundle."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "plain-file").write_text("{}")
    expected = "no bundle here: expected a folder that holds a bundle.json"
    assert expected == problem(tmp_path / place, BundleNotFoundError)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not strict JSON: Expecting value"),
        (b'{"format": ', "not strict JSON: Expecting value"),
        (b"PK\x03\x04 not text \xff\xfe", "not strict JSON: 'utf-8' codec can't decode"),
        (b'{"x": NaN}', "not strict JSON: NaN is not JSON"),
        (b'{"x": [-Infinity]}', "not strict JSON: -Infinity is not JSON"),
        (b'{"x": 1e999}', "not strict JSON: 1e999 is too large a number"),
        (b"[" * 100_000, "not strict JSON: maximum recursion depth exceeded"),
        (b'{"x": ' + b"1" * 5000 + b"}", "not strict JSON: Exceeds the limit"),
        (b"[]", "bundle.json: expected an object"),
        (b"null", "bundle.json: expected an object"),
        (b"{}", "bundle.json: expected format 'nancapture-bundle', came None"),
        (b'{"format": "parquet"}', "bundle.json: expected format 'nancapture-bundle', came 'parquet'"),
    ],
)
def test_not_a_manifest(bundle: Path, content: bytes, message: str) -> None:
    """What is not strict JSON, or not ours, is said to be so."""
    (bundle / "bundle.json").write_bytes(content)
    assert message in problem(bundle)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_a_truncated_manifest(bundle: Path, keep: float) -> None:
    """A bundle.json that was cut short is damaged, wherever the cut."""
    text = (bundle / "bundle.json").read_text()
    (bundle / "bundle.json").write_text(text[: int(len(text) * keep)])
    assert "not strict JSON" in problem(bundle)


def test_a_flipped_bit_anywhere(bundle: Path) -> None:
    """Wherever a bit flips, the outcome is a bundle error or a manifest: never anything else."""
    content = (bundle / "bundle.json").read_bytes()
    refused = 0
    for position in range(0, len(content), 5):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        (bundle / "bundle.json").write_bytes(flipped)
        try:
            load_manifest(bundle)
        except BundleError:
            refused += 1
    assert refused > len(content) / 5 / 2


@pytest.mark.parametrize("version", [None, True, 0, -1, "1", 1.5, [1]])
def test_no_version(bundle: Path, version: object) -> None:
    """A version is a number from 1 up."""
    rewrite(bundle, version=version)
    assert f"bundle.json: expected a version number from 1 up, came {version!r}" == problem(bundle)


def test_a_newer_version(bundle: Path) -> None:
    """A bundle of the future is refused, and the message says that the reader is too old, and what to do."""
    rewrite(bundle, version=7, batch="of an unknown form")
    assert "written in version 7 of the bundle format, newer than version 2" in problem(bundle, BundleVersionError)
    with pytest.raises(BundleVersionError, match=r"\(upgrade it: pip install -U pytest-nancapture\)$"):
        load_manifest(bundle)


def test_an_older_version_is_migrated(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each small function lifts a manifest by one version, in order."""
    rewrite(bundle, version=1)
    monkeypatch.setattr(module, "VERSION", 3)
    steps = {
        1: lambda data: {**data, "code": {"commit": "first"}},
        2: lambda data: {**data, "code": {"commit": data["code"]["commit"] + ", second"}},
    }
    monkeypatch.setattr(module, "MIGRATIONS", steps)
    assert load_manifest(bundle).code.commit == "first, second"


def test_version_1(bundle: Path) -> None:
    """It held changed plain attributes by submodule and name, and no other state."""
    data = json.loads((bundle / "bundle.json").read_text())
    module = {**data["module"], "attributes": {"": {"t": 0.5}, "head": {"scale": {"float": "inf"}}}}
    for name in ("state", "missing"):
        del module[name]
    rewrite(bundle, version=1, module=module)
    assert load_manifest(bundle).module.state == (
        StateRecord(module="", path=(["attribute", "t"],), value=0.5),
        StateRecord(module="head", path=(["attribute", "scale"],), value={"float": "inf"}),
    )


@pytest.mark.parametrize("section", STATE)
def test_an_altered_section_of_the_state(bundle: Path, section: str) -> None:
    """What decides the computation is covered by a hash in bundle.json itself."""
    rewrite(bundle, honest=False, **{section: {"altered": True}})
    assert problem(bundle) == "bundle.json: batch, rng, files or another section of the state was altered"


def test_one_altered_digit_of_the_state(bundle: Path) -> None:
    """A single digit is enough."""
    path = bundle / "bundle.json"
    path.write_text(path.read_text().replace('"total_batch_idx": 812', '"total_batch_idx": 813'))
    assert problem(bundle) == "bundle.json: batch, rng, files or another section of the state was altered"


def test_a_manifest_without_its_hash(bundle: Path) -> None:
    """Leaving the hash out does not switch it off."""
    rewrite(bundle, honest=False, state_sha256=None)
    assert problem(bundle) == "bundle.json: batch, rng, files or another section of the state was altered"


def test_people_may_edit_where_the_module_is(bundle: Path) -> None:
    """After a refactoring the module's target is changed by hand; that is no damage."""
    record = json.loads((bundle / "bundle.json").read_text())["module"]
    rewrite(bundle, honest=False, module={**record, "target": "shop.nets:Net"})
    assert load_manifest(bundle).module.target == "shop.nets:Net"


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../weights.safetensors",
        "sub/weights.safetensors",
        "..",
        "",
        "weights.pt",
        "bundle.json",
        "weights.safetensors\x00",
        "C:\\weights.safetensors",
        "WEIGHTS.SAFETENSORS",
    ],
)
def test_unknown_file_names(bundle: Path, name: str) -> None:
    """File names are fixed: a manifest cannot make the reader look anywhere else, not even with a right hash."""
    files = {**fake_manifest().files, name: FileRecord(bytes=1, sha256="0" * 64)}
    (bundle / "bundle.json").write_text(fake_manifest().dumps())
    rewrite(bundle, files={key: dataclasses.asdict(record) for key, record in files.items()})
    assert problem(bundle).startswith(
        f"bundle.json: files: {name!r} is no file of a bundle; expected weights.safetensors"
    )


@pytest.mark.parametrize("name", module.REQUIRED_FILES)
def test_a_required_file_that_is_not_listed(bundle: Path, name: str) -> None:
    """Weights, batch and random states belong to every bundle."""
    files = json.loads((bundle / "bundle.json").read_text())["files"]
    del files[name]
    rewrite(bundle, files=files)
    assert f"bundle.json: files: {name} is missing" == problem(bundle)


def broken(**sections: Any) -> Manifest:
    return fake_manifest(**sections)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (broken(batch={"window": ()}), "batch.window: expected at least one micro-batch"),
        (broken(rng={"instants": ({}, {})}), "rng.instants: expected one per micro-batch"),
        (
            broken(batch={"window": (MicroBatch(batch_idx=0, tree=None), MicroBatch(batch_idx=1, tree=None))}),
            "rng.instants: expected one per micro-batch",
        ),
        (broken(optimizer=OptimizerRecord(states=())), "files: optimizer.safetensors is missing"),
    ],
)
def test_sections_that_contradict_each_other(bundle: Path, manifest: Manifest, message: str) -> None:
    """Each section may be sound and the whole still make no sense."""
    (bundle / "bundle.json").write_text(manifest.dumps())
    assert f"bundle.json: {message}" == problem(bundle)


def test_a_field_of_the_wrong_type(bundle: Path) -> None:
    """The message names the field."""
    rewrite(bundle, fault="nan")
    assert problem(bundle) == "bundle.json: fault: expected an object, came a string"


def test_a_missing_section(bundle: Path) -> None:
    """So it does where a whole section is gone."""
    data = json.loads((bundle / "bundle.json").read_text())
    del data["fault"]
    (bundle / "bundle.json").write_text(json.dumps(data))
    assert problem(bundle) == "bundle.json: fault: missing"


def test_a_symlink_in_place_of_the_manifest(bundle: Path, tmp_path: Path) -> None:
    """A bundle holds plain files: a link could lead anywhere."""
    (bundle / "bundle.json").rename(tmp_path / "elsewhere.json")
    (bundle / "bundle.json").symlink_to(tmp_path / "elsewhere.json")
    assert problem(bundle) == "bundle.json is not a plain file"


def test_a_folder_in_place_of_the_manifest(tmp_path: Path) -> None:
    """A folder of that name is no bundle.json."""
    (tmp_path / "b" / "bundle.json").mkdir(parents=True)
    assert "no bundle here" in problem(tmp_path / "b", BundleNotFoundError)


def test_a_huge_manifest_is_not_read(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is looked at before its content."""
    monkeypatch.setattr(module, "MANIFEST_LIMIT", 100)
    (bundle / "bundle.json").write_text("not JSON" * 100)
    assert problem(bundle) == "bundle.json is larger than 100 bytes"


def test_a_manifest_that_may_not_be_read(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system says is passed on, for this bundle alone."""

    def refuse(path: Path, **_: Any) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert problem(bundle) == "bundle.json cannot be read: Permission denied"


def test_names_of_initial_weights() -> None:
    """Names that end alike are written together, and come back."""
    names = ["fc.bias", "fc.weight", "head.bias", "head.weight", "scale", "norm.0.weight"]
    record = InitialRecord.of(names, seed=3)

    assert record.names == {"bias weight": ("fc", "head"), "scale": ("",), "weight": ("norm.0",)}
    assert sorted(record.all_names()) == sorted(names)


HEAVY = "sorted({'torch', 'lightning', 'numpy', 'safetensors', 'pytest'} & set(sys.modules))"


@pytest.mark.parametrize(("extra", "expected"), [("", "[]"), ("import numpy; ", "['numpy']")])
def test_reading_imports_nothing_heavy(bundle: Path, extra: str, expected: str) -> None:
    """Collection must cost a test run nothing; and the check does see a heavy import where there is one."""
    code = (
        f"import sys; from pytest_nancapture.bundle.bundle import Bundle; {extra}"
        f"Bundle.open({str(bundle)!r}).verify(); print({HEAVY})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert expected == done.stdout.strip()
