"""What tests share is in ``kit``, which pyproject.toml puts on the path."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

KIT = [path.stem for path in sorted((Path(__file__).parent / "kit").glob("*.py"))]
# What fails there is told as in a test.
pytest.register_assert_rewrite(*KIT)

pytest_plugins = ["kit_checks", "kit_fake_server", "kit_reference", "kit_sources"]

# How long one example takes says nothing on a machine that does other things.
settings.register_profile("streamer", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("streamer")
