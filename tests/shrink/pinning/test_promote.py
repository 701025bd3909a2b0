"""Promotion: of all that a bundle says, one word changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_bundles import write_bundle

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import PinRecord
from pytest_nancapture.shrink.pinning import promote as module
from pytest_nancapture.shrink.pinning.promote import promote


@pytest.mark.parametrize(
    "text",
    [
        '{{"pin": {{"known":true, "note": "mine"}}, {rest}}}',
        '{{\n\n"a": {{"known": true}}, "pin": {{ "known" :  true }},\n {rest}\n}}',
        '{{"a": "\\"known\\": true", "pin": {{"known": true}}, {rest}}}',
        '{{"pin": {{"kno\\u0077n": true}}, {rest}}}',
    ],
)
def test_promotion_changes_one_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Whatever else people wrote into the file by hand, and however they laid it out."""
    folder = write_bundle(tmp_path / "b", pin=PinRecord(known=True))
    path = folder / "bundle.json"
    data: dict[str, Any] = json.loads(path.read_text())
    del data["pin"]
    before = text.format(rest=json.dumps(data)[1:-1])
    path.write_text(before)
    monkeypatch.setattr(module, "replay_afresh", lambda *_: {"finite": True})
    promote(folder)
    after = path.read_text()
    assert not Bundle.open(folder).known
    wanted = json.loads(before)
    wanted["pin"]["known"] = False
    assert wanted == json.loads(after)
    if "u0077" not in text:
        assert len(after) == len(before) + 1
    assert len(list(folder.iterdir())) == 4
