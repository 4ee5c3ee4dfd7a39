import pytest

pytest.register_assert_rewrite(*(f"tests.directory.{each}" for each in ("harness", "contract", "programs", "faults")))
