import pytest

pytest.register_assert_rewrite("tests.directory.contract", "tests.directory.programs", "tests.directory.faults")
