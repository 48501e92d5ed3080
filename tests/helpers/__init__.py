"""What several files of tests share."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite(*(f"helpers.{path.stem}" for path in Path(__file__).parent.glob("[a-z]*.py")))
