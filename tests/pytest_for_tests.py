"""Short names of what pytest gives a test."""

import pytest

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
