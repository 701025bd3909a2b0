"""A stand-in for worker processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_nancapture import Bundle
from pytest_nancapture.shrink.candidate.worker import Worker


class Inline:
    """A pool whose only worker is this process."""

    jobs = 1

    def __init__(self, bundle: Path, device: str, jobs: int = 1) -> None:
        self._worker = Worker(Bundle.open(bundle), device, 1)

    def __enter__(self) -> Inline:  # noqa: PYI034, typing has no Self on Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, requests: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
        answers = []
        for request in requests:
            try:
                answers.append(json.loads(json.dumps(self._worker.answer(json.loads(json.dumps(request))))))
            except Exception as error:
                answers.append({"error": {"type": type(error).__name__, "message": str(error)}})
        return answers
